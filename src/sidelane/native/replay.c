/* Calls of a communicator that repeat: what Python does for them, in one function.

   A call that was made before, with the same tensors in the same places, from the same stream, does the same again: it
   takes a number, posts it for the peers, gives memory operations their values, runs the prepared calls of the driver,
   and notes what it did. Python does that in some fifteen functions and 4 microseconds. Here a call is remembered once,
   by Python, as C values; to repeat it is to compare and to run. Whatever is not exactly as it was, `run` says so before
   anything has happened, and Python does it: this file decides nothing.

   What Python reads and writes too (watch, ledger) stays Python's, and is reached by the attributes that `remember` and
   `Replay` are told. The GIL is held throughout but for the calls of the driver, which may block for as long as a peer
   is late; the executor's lock is held around them, as everywhere.

   And so do launches of kernels (sidelane.session.own_kernel), of which Python knows that they come again.

   It is compiled where it is first used (see build.py), and nothing needs it. One file, since one command compiles it:
   questions about tensors, entries and their place in the table, records, a repeated call, launches, the type. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define TABLE 4096         /* calls remembered, as many as Python remembers */
#define PROBES 8           /* places of the table where one may be */
#define MOST_ARGUMENTS 8   /* of a call of the driver */
#define MOST_TENSORS 128   /* of a call, in all of its lists */
#define HEADER_WORDS 4     /* of a record, in front of its payload */
#define UNIT 16            /* bytes, by multiples of which the addresses of calls of one shape differ */
#define SPARE 64         /* events that wait to be recorded again */

/* of the driver's interface */
#define NOT_READY 600
#define NO_TIMING 2

enum Effect { SET, SET_NUMBER, SET_PAIR, APPEND_PAIR, COUNT, EFFECTS };

typedef struct {
    uint64_t address, nbytes;
    PyObject *dtype;
    uint64_t storage, start; /* of one in a pool that an entry is for: its storage, and where that begins; else 0 */
} Tensor;

/* What a caller asks for, of whose tensors everything is known. There is room for two at least. */
typedef struct {
    PyObject *kind, *details, *variant, *beside;
    long long aside; /* stream to run on; 0: the caller's */
    Py_ssize_t tensors;
    int lists; /* in which they came, all of one length; 0 for tensors by themselves */
    Tensor *tensor;
} Request;

/* A call of the driver: a C function of integers, or else a Python callable with its arguments. */
typedef struct {
    void *function;
    int count;
    uint64_t arguments[MOST_ARGUMENTS];
    PyObject *callable, *tuple;
} Step;

/* 32-bit values `base + per_call * number`, at `count` places `stride` bytes apart. */
typedef struct {
    uint32_t base, per_call;
    char *first;
    Py_ssize_t stride, count;
} Words;

typedef struct {
    enum Effect what;
    PyObject *target, *name, *value;
} Note;

/* A word of the steps that follows where a tensor lies. */
typedef struct {
    int tensor;
    uint64_t delta, *where;
} Follower;

/* Of a call that is made wherever its tensors lie, if these are ordinary memory: its request has their addresses modulo
   UNIT. */
typedef struct {
    PyObject *ranges; /* of symmetric memory, pairs of 64-bit words; NULL: of a call that is made at its addresses only */
    long device;      /* of the tensors, as `get_device` has it */
    long long distance; /* from the first tensor to the second, where they overlap */
    int overlaps, followers;
    Follower *follower;
} Shape;

typedef struct {
    PyObject *keep; /* a tuple of everything below: the one reference */
    PyObject *generation, *signature, *payload, *failed;
    Request request;
    long long stream;
    int steps, words, notes;
    Step *step;
    Words *word;
    Note *note;
    Shape shape;
    int users;       /* runs that are under way */
    int dropped;
} Entry;

typedef uint64_t U;

/* Functions of the driver that order streams; all NULL where Python does. */
typedef struct {
    int (*record)(U event, U stream), (*wait)(U stream, U event, unsigned flags), (*query)(U event);
    int (*create)(U *event, unsigned flags), (*destroy)(U event), (*capturing)(U stream, int *is);
} Streams;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* a tuple of everything below */
    PyObject *guards, *stream_of, *capturing, *current_device, *index, *generation, *last, *last_name, *counter, *counter_name;
    PyObject *control, *post, *post_lock, *try_lock, *unlock, *count_version, *tensor_type;
    PyObject *records;
    uint64_t **record_words, *begun;
    Py_ssize_t record_count, room; /* records, and bytes of a payload that each has room for */
    long long index_value;
    Entry *table[TABLE];
    unsigned next_victim;
    unsigned long long made; /* calls and launches so far */
    Streams streams;
    U spare[SPARE];
    int spares;
} Replay;

/* The end of a call on another stream than its caller's: an event, which is recorded again when nothing refers to it. */
typedef struct {
    PyObject_HEAD
    Replay *replay;
    U event;
    long long caller; /* the stream that the call is behind */
} Mark;

static PyTypeObject MarkType;

static PyObject *n_get_device, *n_untyped_storage, *n_cdata, *n_data_ptr, *n_nbytes, *n_dtype, *n_is_contiguous, *n_is_neg, *n_locked, *n_written, *n_status, *n_digest, *n_unread;

/* --- small questions --------------------------------------------------------------------------------------------- */

static int same(PyObject *a, PyObject *b) { return a == b ? 1 : PyObject_RichCompareBool(a, b, Py_EQ); }

/* What a callable without arguments returns, as a number; -1 with an error set. */
static long long number_from(PyObject *object)
{
    if (object == NULL)
        return -1;
    long long value = PyLong_AsLongLong(object);
    Py_DECREF(object);
    return value;
}

static int is_true(PyObject *object) /* of a new reference; -1 with an error set */
{
    if (object == NULL)
        return -1;
    int value = object == Py_True ? 1 : object == Py_False ? 0 : PyObject_IsTrue(object);
    Py_DECREF(object);
    return value;
}

static int is_guard(PyObject *guard)
{
    if (PyTuple_Check(guard) && PyTuple_GET_SIZE(guard) == 3)
        return 1;
    PyErr_SetString(PyExc_TypeError, "a guard is (object, attribute, the value that lets calls pass)");
    return 0;
}

/* 1: the attribute is the very object that lets calls pass. 0: it is not. -1: an error. */
static int passes(PyObject *guard)
{
    PyObject *found = PyObject_GetAttr(PyTuple_GET_ITEM(guard, 0), PyTuple_GET_ITEM(guard, 1));
    Py_XDECREF(found); /* compared, not used */
    return found == NULL ? -1 : found == PyTuple_GET_ITEM(guard, 2);
}

static PyObject *ask(PyObject *object, PyObject *method) { return PyObject_VectorcallMethod(method, &object, 1, NULL); }

static int unsigned_from(PyObject *object, uint64_t *value) /* of a new reference; 0, or -1 with an error set */
{
    if (object == NULL)
        return -1;
    *value = PyLong_AsUnsignedLongLong(object);
    Py_DECREF(object);
    return PyErr_Occurred() ? -1 : 0;
}

/* 1: found out what a tensor is. 0: it is none that is remembered. -1: an error. */
static int look_at(PyObject *object, PyObject *tensor_type, Tensor *tensor)
{
    if (!PyObject_TypeCheck(object, (PyTypeObject *)tensor_type))
        return 0;
    int answer = is_true(ask(object, n_is_neg)); /* which lets other threads run, so that it is asked first */
    if (answer)
        return answer < 0 ? -1 : 0;
    if ((answer = is_true(ask(object, n_is_contiguous))) != 1)
        return answer;
    if (unsigned_from(ask(object, n_data_ptr), &tensor->address))
        return -1;
    if (unsigned_from(PyObject_GetAttr(object, n_nbytes), &tensor->nbytes))
        return -1;
    tensor->dtype = PyObject_GetAttr(object, n_dtype);
    Py_XDECREF(tensor->dtype); /* compared, not used */
    return tensor->dtype == NULL ? -1 : 1;
}

/* --- entries ----------------------------------------------------------------------------------------------------- */

static void free_entry(Entry *entry)
{
    if (entry->users) {
        entry->dropped = 1;
        return;
    }
    PyObject *keep = entry->keep;
    PyMem_Free(entry->request.tensor);
    PyMem_Free(entry->step);
    PyMem_Free(entry->word);
    PyMem_Free(entry->note);
    PyMem_Free(entry->shape.follower);
    PyMem_Free(entry);
    Py_DECREF(keep);
}

static void leave_entry(Entry *entry)
{
    if (!--entry->users && entry->dropped)
        free_entry(entry);
}

/* Where to look first; an error of a strange variant's hash is none of a place. */
static unsigned home_of(const Request *request, long long stream)
{
    Py_hash_t variant = PyObject_Hash(request->variant);
    if (variant == -1)
        PyErr_Clear();
    uint64_t mix = ((request->tensor[0].address >> 4) + request->tensor[0].nbytes) * 0x9E3779B97F4A7C15u;
    mix ^= ((request->tensor[1].address >> 4) + request->tensor[1].nbytes) * 0xC2B2AE3D27D4EB4Fu;
    mix ^= (uint64_t)(uintptr_t)request->kind * 0x165667B19E3779F9u ^ (uint64_t)stream * 0x27D4EB2F165667C5u;
    mix ^= (uint64_t)variant;
    return (unsigned)(mix >> 32) % TABLE;
}

/* 1: both ask for the same. 0: they do not. -1: an error. */
static int same_request(const Request *a, const Request *b)
{
    if (a->tensors != b->tensors || a->lists != b->lists)
        return 0;
    for (Py_ssize_t i = 0; i < a->tensors; i++) {
        const Tensor *one = &a->tensor[i], *other = &b->tensor[i];
        if (one->address != other->address || one->nbytes != other->nbytes || one->dtype != other->dtype)
            return 0;
    }
    int answer = same(a->kind, b->kind);
    if (answer == 1)
        answer = same(a->variant, b->variant);
    if (answer == 1)
        answer = same(a->beside, b->beside);
    return answer == 1 ? same(a->details, b->details) : answer;
}

/* What two tensors of a call are to each other. */
static void relate(const Request *request, Shape *shape)
{
    const Tensor *a = &request->tensor[0], *b = &request->tensor[1];
    shape->overlaps = request->tensors == 2 && a->address < b->address + b->nbytes && b->address < a->address + a->nbytes;
    shape->distance = shape->overlaps ? (long long)(b->address - a->address) : 0;
}

/* 1: both are made at their addresses only, or both wherever tensors lie that are to each other as these. */
static int same_form(const Shape *a, const Shape *b)
{
    return (a->ranges == NULL) == (b->ranges == NULL) && a->overlaps == b->overlaps && a->distance == b->distance;
}

static int read_steps(Entry *entry, PyObject *steps)
{
    Py_ssize_t count = PyTuple_GET_SIZE(steps);
    entry->step = PyMem_Calloc(count ? count : 1, sizeof(Step));
    if (entry->step == NULL)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *target, *arguments, *pair = PyTuple_GET_ITEM(steps, i);
        Step *step = &entry->step[i];
        PyObject *kept; /* what the addresses among the arguments point to */
        if (!PyArg_ParseTuple(pair, "OO!O", &target, &PyTuple_Type, &arguments, &kept))
            return -1;
        if (!PyLong_Check(target)) {
            step->callable = target, step->tuple = arguments;
        } else {
            step->function = PyLong_AsVoidPtr(target);
            step->count = (int)PyTuple_GET_SIZE(arguments);
            if (step->function == NULL || step->count > MOST_ARGUMENTS) {
                PyErr_Format(PyExc_ValueError, "remember: a call (value=%zd arguments, allowed=..%d, and a function)",
                             (Py_ssize_t)step->count, MOST_ARGUMENTS);
                return -1;
            }
            for (int a = 0; a < step->count; a++)
                step->arguments[a] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(arguments, a));
        }
        if (PyErr_Occurred())
            return -1;
        entry->steps++;
    }
    return 0;
}

static int read_words(Entry *entry, PyObject *words)
{
    Py_ssize_t count = PyTuple_GET_SIZE(words);
    entry->word = PyMem_Calloc(count ? count : 1, sizeof(Words));
    if (entry->word == NULL)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        Words *word = &entry->word[i];
        unsigned long base, per_call;
        unsigned long long first;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(words, i), "kk(Knn)", &base, &per_call, &first, &word->stride, &word->count))
            return -1;
        word->base = (uint32_t)base, word->per_call = (uint32_t)per_call, word->first = (char *)(uintptr_t)first;
        entry->words++;
    }
    return 0;
}

static int read_notes(Entry *entry, PyObject *notes)
{
    Py_ssize_t count = PyTuple_GET_SIZE(notes);
    entry->note = PyMem_Calloc(count ? count : 1, sizeof(Note));
    if (entry->note == NULL)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        Note *note = &entry->note[i];
        int what;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(notes, i), "iOOO", &what, &note->target, &note->name, &note->value))
            return -1;
        note->what = (enum Effect)what;
        if (what < 0 || what >= EFFECTS || (what == COUNT && !PyList_Check(note->target))) {
            PyErr_Format(PyExc_ValueError, "remember: an effect (value=%d, allowed=0..%d)", what, EFFECTS - 1);
            return -1;
        }
        entry->notes++;
    }
    return 0;
}

static int read_shape(Entry *entry, PyObject *given)
{
    PyObject *rows;
    Shape *shape = &entry->shape;
    if (given == NULL || given == Py_None)
        return 0;
    if (!PyArg_ParseTuple(given, "SlpLO!", &shape->ranges, &shape->device, &shape->overlaps, &shape->distance,
                          &PyTuple_Type, &rows))
        return -1;
    Py_ssize_t count = PyTuple_GET_SIZE(rows);
    shape->follower = PyMem_Calloc(count ? count : 1, sizeof(Follower));
    if (shape->follower == NULL)
        return PyErr_NoMemory(), -1;
    if (entry->request.lists || entry->request.tensors > 2)
        return PyErr_SetString(PyExc_ValueError, "remember: a shape is one of one or two tensors that are staged"), -1;
    for (Py_ssize_t i = 0; i < entry->request.tensors; i++)
        entry->request.tensor[i].address %= UNIT;
    for (Py_ssize_t i = 0; i < count; i++) {
        unsigned long long delta, address;
        int tensor, step, argument;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(rows, i), "iKiiK", &tensor, &delta, &step, &argument, &address))
            return -1;
        if (tensor < 0 || tensor >= entry->request.tensors || step < 0 || step >= entry->steps || argument < 0 ||
            argument >= entry->step[step].count)
            return PyErr_SetString(PyExc_ValueError, "remember: what follows a tensor is an argument of a step"), -1;
        uint64_t *where = address ? (uint64_t *)(uintptr_t)address : &entry->step[step].arguments[argument];
        shape->follower[i] = (Follower){tensor, delta, where};
        shape->followers++;
    }
    return 0;
}

/* Where an entry goes: in place of the same call, or of one that will never come again, or where nothing is. With an
   error set, nowhere. */
static unsigned choose_target(Replay *self, const Entry *entry)
{
    unsigned home = home_of(&entry->request, entry->stream), free = TABLE;
    for (unsigned probe = 0; probe < PROBES; probe++) {
        unsigned place = (home + probe) % TABLE;
        Entry *other = self->table[place];
        if (other == NULL || other->generation != entry->generation) {
            free = free == TABLE ? place : free;
        } else if (other->stream == entry->stream) {
            other->users++; /* to compare may run Python, which may forget it */
            int answer = same_form(&other->shape, &entry->shape);
            if (answer == 1)
                answer = same_request(&other->request, &entry->request);
            leave_entry(other);
            if (answer)
                return place;
        }
    }
    return free != TABLE ? free : (home + self->next_victim++ % PROBES) % TABLE;
}

PyDoc_STRVAR(remember_doc, "remember(kind, tensors, lists, details, variant, beside, generation, stream, "
                           "signature, payload, steps, words, notes, failed, owner, shape=None)\n--\n\n"
                           "Remember a call; see sidelane.collectives.repeat, which makes the arguments.");

static PyObject *replay_remember(Replay *self, PyObject *all)
{
    PyObject *tensors, *steps, *words, *notes, *shape = NULL;
    PyObject *owner; /* of whatever the steps need, kept like everything */
    Entry *entry = PyMem_Calloc(1, sizeof(Entry));
    if (entry == NULL)
        return PyErr_NoMemory();
    entry->keep = Py_NewRef(all);
    if (!PyArg_ParseTuple(all, "OO!iOOOOLOSO!O!O!OO|O", &entry->request.kind, &PyTuple_Type, &tensors,
                          &entry->request.lists, &entry->request.details, &entry->request.variant, &entry->request.beside,
                          &entry->generation, &entry->stream,
                          &entry->signature, &entry->payload, &PyTuple_Type, &steps, &PyTuple_Type, &words,
                          &PyTuple_Type, &notes, &entry->failed, &owner, &shape))
        goto fail;
    if (PyBytes_GET_SIZE(entry->payload) > self->room) {
        PyErr_Format(PyExc_ValueError, "remember: payload bytes (value=%zd, allowed=..%zd)",
                     PyBytes_GET_SIZE(entry->payload), self->room);
        goto fail;
    }
    Request *request = &entry->request;
    request->tensors = PyTuple_GET_SIZE(tensors);
    if (request->tensors < 1 || request->tensors > MOST_TENSORS) {
        PyErr_Format(PyExc_ValueError, "remember: tensors (value=%zd, allowed=1..%d)", request->tensors, MOST_TENSORS);
        goto fail;
    }
    request->tensor = PyMem_Calloc(request->tensors + 1, sizeof(Tensor));
    if (request->tensor == NULL) {
        PyErr_NoMemory();
        goto fail;
    }
    for (Py_ssize_t i = 0; i < request->tensors; i++) {
        unsigned long long address, nbytes, storage = 0, start = 0;
        PyObject *dtype;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tensors, i), "KKO|KK", &address, &nbytes, &dtype, &storage, &start))
            goto fail;
        request->tensor[i] = (Tensor){address, nbytes, dtype, storage, start};
    }
    if (read_steps(entry, steps) || read_words(entry, words) || read_notes(entry, notes) ||
        read_shape(entry, shape))
        goto fail;
    unsigned chosen = choose_target(self, entry);
    if (PyErr_Occurred())
        goto fail;
    Entry *old = self->table[chosen];
    self->table[chosen] = entry;
    if (old != NULL)
        free_entry(old);
    Py_RETURN_NONE;
fail:
    free_entry(entry);
    return NULL;
}

/* --- records that peers read (sidelane.memory.record says how) ---------------------------------------------------- */

static uint32_t crc_table[8][256];

static void make_crc_table(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xEDB88320u : 0);
        crc_table[0][byte] = crc;
    }
    for (int ahead = 1; ahead < 8; ahead++)
        for (int byte = 0; byte < 256; byte++)
            crc_table[ahead][byte] = crc_table[ahead - 1][byte] >> 8 ^ crc_table[0][crc_table[ahead - 1][byte] & 255];
}

/* zlib's crc32. */
static uint32_t checksum(uint32_t start, const unsigned char *bytes, Py_ssize_t count)
{
    uint32_t crc = ~start;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    for (; count >= 8; bytes += 8, count -= 8) {
        uint32_t low, high;
        memcpy(&low, bytes, 4);
        memcpy(&high, bytes + 4, 4);
        low ^= crc;
        crc = crc_table[7][low & 255] ^ crc_table[6][low >> 8 & 255] ^ crc_table[5][low >> 16 & 255] ^
              crc_table[4][low >> 24] ^ crc_table[3][high & 255] ^ crc_table[2][high >> 8 & 255] ^
              crc_table[1][high >> 16 & 255] ^ crc_table[0][high >> 24];
    }
#endif
    for (; count > 0; bytes++, count--)
        crc = crc >> 8 ^ crc_table[0][(crc ^ *bytes) & 255];
    return ~crc;
}

/* Replace a record: its number, its status, which is 0, and its payload, which fits. The digest that it has now. */
static uint64_t write_record(uint64_t *words, uint64_t number, PyObject *payload)
{
    Py_ssize_t length = PyBytes_GET_SIZE(payload);
    const char *bytes = PyBytes_AS_STRING(payload);
    uint64_t sequence = (__atomic_load_n(&words[0], __ATOMIC_RELAXED) | 1) + 1;
    __atomic_store_n(&words[0], sequence - 1, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    memcpy(words + HEADER_WORDS, bytes, length);
    uint64_t digest = (uint64_t)length << 32 | checksum((uint32_t)(sequence << 8), (const unsigned char *)bytes, length);
    __atomic_store_n(&words[1], number, __ATOMIC_RELAXED);
    __atomic_store_n(&words[2], digest, __ATOMIC_RELAXED);
    __atomic_store_n(&words[3], number ^ digest, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_store_n(&words[0], sequence, __ATOMIC_RELAXED);
    return digest;
}

/* --- a repeated call ---------------------------------------------------------------------------------------------- */

static int all_pass(PyObject *guards)
{
    int open = 1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guards) && open == 1; i++)
        open = passes(PyTuple_GET_ITEM(guards, i));
    return open;
}

/* 1: nothing stands in the way. 0: something does, which Python will name. -1: an error. */
static int is_open(Replay *self) { return all_pass(self->guards); }

static U take_event(Replay *self)
{
    U event = 0;
    if (self->spares)
        return self->spare[--self->spares];
    return self->streams.create(&event, NO_TIMING) ? 0 : event;
}

static void leave_event(Replay *self, U event)
{
    if (self->spares < SPARE)
        self->spare[self->spares++] = event;
    else
        self->streams.destroy(event);
}

/* Let a stream wait for all that another one has so far. 1: it does. */
static int follow(Replay *self, long long stream, long long other)
{
    int refused, ours = 0, theirs = 0; /* captured: what is in a graph takes no part in this, nor do unknown streams */
    if ((stream && (self->streams.capturing((U)stream, &ours) || ours)) ||
        (other && (self->streams.capturing((U)other, &theirs) || theirs)))
        return 0;
    U event = take_event(self);
    if (!event)
        return 0;
    Py_BEGIN_ALLOW_THREADS /* the channel of a stream may be full for as long as a peer is late */
    refused = self->streams.record(event, (U)other) || self->streams.wait((U)stream, event, 0);
    Py_END_ALLOW_THREADS
    leave_event(self, event);
    return !refused;
}

/* Streams of a call: the caller's, that of the last call, and the one to run on. */
typedef struct {
    long long caller, last, run;
} Way;

/* 1: found the streams of a call on `aside` or else on the caller's stream, which is not captured, and whose device is
   current. 0: elsewhere, or with an error set. */
static int find_way(Replay *self, long long aside, Way *way)
{
    if (number_from(PyObject_CallNoArgs(self->current_device)) != self->index_value)
        return 0;
    way->caller = number_from(PyObject_CallOneArg(self->stream_of, self->index));
    if (way->caller == -1 || (way->caller && is_true(PyObject_CallNoArgs(self->capturing)) != 0))
        return 0;
    PyObject *last = PyObject_GetAttr(self->last, self->last_name);
    if (last == Py_None) {
        Py_DECREF(last);
        return 0;
    }
    way->run = aside ? aside : way->caller, way->last = number_from(last);
    return !PyErr_Occurred() && (self->streams.record != NULL || (way->run == way->caller && way->run == way->last));
}

/* Put a call behind its caller's work so far and behind the last call. 1: it is. */
static int order(Replay *self, const Way *way)
{
    if (way->run != way->caller && !follow(self, way->run, way->caller))
        return 0;
    if (way->last == way->run)
        return 1;
    if (way->last != way->caller || way->run == way->caller) /* else it is behind that already */
        if (!follow(self, way->run, way->last))
            return 0;
    PyObject *number = PyLong_FromLongLong(way->run); /* which Python notes, too, before it runs a call */
    int noted = number != NULL && !PyObject_SetAttr(self->last, self->last_name, number);
    Py_XDECREF(number);
    return noted;
}

/* The remembered call of a form, with a user more; NULL if there is none, or with an error set. */
static Entry *find(Replay *self, const Request *request, const Shape *form, long long stream)
{
    unsigned home = home_of(request, stream);
    for (unsigned probe = 0; probe < PROBES; probe++) {
        Entry *entry = self->table[(home + probe) % TABLE];
        if (entry == NULL || entry->stream != stream || entry->generation != PyList_GET_ITEM(self->generation, 0))
            continue;
        if (!same_form(&entry->shape, form))
            continue;
        entry->users++; /* to compare may run Python, which may remember something else in its place */
        int answer = same_request(&entry->request, request);
        if (answer == 1 && !entry->dropped)
            return entry;
        leave_entry(entry);
        if (answer < 0)
            return NULL;
    }
    return NULL;
}

/* 1: a tensor is ordinary memory of its device, which has room for its elements. -1: an error. */
static int is_ordinary(PyObject *object, const Tensor *tensor, const Shape *shape)
{
    const uint64_t *range = (const uint64_t *)(void *)PyBytes_AS_STRING(shape->ranges);
    uint64_t start, nbytes;
    for (Py_ssize_t i = PyBytes_GET_SIZE(shape->ranges) / 16; i > 0; i--, range += 2)
        if (range[0] <= tensor->address && tensor->address < range[1])
            return 0;
    if (number_from(ask(object, n_get_device)) != shape->device)
        return PyErr_Occurred() ? -1 : 0;
    PyObject *storage = ask(object, n_untyped_storage);
    int failed = storage == NULL || unsigned_from(ask(storage, n_data_ptr), &start) ||
                 unsigned_from(ask(storage, n_nbytes), &nbytes);
    Py_XDECREF(storage);
    return failed ? -1 : tensor->address + tensor->nbytes <= start + nbytes;
}

/* The remembered call that is made wherever its tensors lie, with a user more; NULL if there is none, or with an
   error set. */
static Entry *find_shape(Replay *self, const Request *request, PyObject *tensors, long long stream)
{
    Tensor offsets[2] = {{0}};
    Request moved = *request;
    Shape form = {.ranges = tensors};
    if (request->lists || request->tensors > 2)
        return NULL;
    for (Py_ssize_t i = 0; i < request->tensors; i++) {
        if (!request->tensor[i].address || !request->tensor[i].nbytes)
            return NULL;
        offsets[i] = request->tensor[i], offsets[i].address %= UNIT;
    }
    moved.tensor = offsets;
    relate(request, &form);
    Entry *entry = find(self, &moved, &form, stream);
    if (entry == NULL)
        return NULL;
    int ordinary = 1;
    for (Py_ssize_t i = 0; i < request->tensors && ordinary == 1; i++)
        ordinary = is_ordinary(PyTuple_GET_ITEM(tensors, i), &request->tensor[i], &entry->shape);
    /* Python may have let other threads run. */
    int open = ordinary == 1 && !entry->dropped && entry->generation == PyList_GET_ITEM(self->generation, 0);
    if (open && is_open(self) == 1)
        return entry;
    leave_entry(entry);
    return NULL;
}

/* 1: a tensor has the storage whose place the ranks have compared, where an entry is for one. -1: an error. */
static int is_compared(PyObject *object, const Tensor *known)
{
    uint64_t place, start;
    if (!known->storage)
        return 1;
    PyObject *storage = ask(object, n_untyped_storage);
    int failed = storage == NULL || unsigned_from(PyObject_GetAttr(storage, n_cdata), &place) ||
                 unsigned_from(ask(storage, n_data_ptr), &start);
    Py_XDECREF(storage);
    return failed ? -1 : place == known->storage && start == known->start;
}

/* The remembered call that is made at its addresses, with a user more; NULL if there is none, or with an error set. */
static Entry *find_there(Replay *self, const Request *request, PyObject *tensors, long long stream)
{
    const Shape at_its_addresses = {0};
    Entry *entry = find(self, request, &at_its_addresses, stream);
    int compared = 1;
    for (Py_ssize_t i = 0; entry != NULL && i < request->tensors && compared == 1; i++)
        compared = is_compared(PyTuple_GET_ITEM(tensors, i), &entry->request.tensor[i]);
    if (compared == 1)
        return entry;
    leave_entry(entry);
    return NULL;
}

/* 1: peers may still have to read what a post of this number replaces, so that Python waits for them. -1: an error. */
static int is_unread(Replay *self, uint64_t number)
{
    PyObject *unread = PyObject_GetAttr(self->control, n_unread);
    if (unread == NULL)
        return -1;
    uint64_t call = PyLong_AsUnsignedLongLong(unread);
    Py_DECREF(unread);
    return PyErr_Occurred() ? -1 : call && number >= call + (uint64_t)self->record_count;
}

/* Keep in a record's attributes what its memory holds; they are what Python's writer goes by. */
static int note_written(PyObject *record, PyObject *payload, uint64_t digest)
{
    PyObject *status = PyLong_FromLong(0), *number = PyLong_FromUnsignedLongLong(digest);
    int failed = status == NULL || number == NULL || PyObject_SetAttr(record, n_status, status) ||
                 PyObject_SetAttr(record, n_digest, number) || PyObject_SetAttr(record, n_written, payload);
    Py_XDECREF(status);
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

/* Put a post into a record of this rank's. One like that which it replaces changes the number alone. */
static int write_post(PyObject *record, uint64_t *words, PyObject *payload, uint64_t number)
{
    PyObject *written = PyObject_GetAttr(record, n_written), *status = PyObject_GetAttr(record, n_status);
    PyObject *digest = PyObject_GetAttr(record, n_digest);
    int known = written != NULL && status != NULL && digest != NULL;
    int repeats = known && written == payload && PyLong_Check(status) && PyObject_Not(status) == 1;
    uint64_t tie = repeats ? number ^ PyLong_AsUnsignedLongLong(digest) : 0;
    Py_XDECREF(written);
    Py_XDECREF(status);
    Py_XDECREF(digest);
    if (PyErr_Occurred())
        return -1;
    if (repeats) {
        __atomic_store_n(&words[1], number, __ATOMIC_RELAXED);
        __atomic_store_n(&words[3], tie, __ATOMIC_RELAXED);
    } else {
        if (PyObject_SetAttr(record, n_written, Py_None))
            return -1;
        if (note_written(record, payload, write_record(words, number, payload)))
            PyErr_Clear(); /* there is no memory, but a post: what is written is not known, and replaced the next time */
    }
    return 0;
}

/* Let the peers know of the call. */
static int post_number(Replay *self, Entry *entry, PyObject *number, uint64_t value)
{
    Py_ssize_t slot = (Py_ssize_t)(value % (uint64_t)self->record_count);
    int posting = is_true(ask(self->post_lock, n_locked)); /* another thread of this rank */
    int unread = posting < 0 ? -1 : is_unread(self, value);
    if (unread < 0)
        return -1;
    if (unread || posting) {
        PyObject *arguments[] = {number, entry->signature};
        PyObject *done = PyObject_Vectorcall(self->post, arguments, 2, NULL);
        Py_XDECREF(done);
        return done == NULL ? -1 : 0;
    }
    if (write_post(PyTuple_GET_ITEM(self->records, slot), self->record_words[slot], entry->payload, value))
        return -1;
    if (__atomic_load_n(self->begun, __ATOMIC_RELAXED) < value)
        __atomic_store_n(self->begun, value, __ATOMIC_RELEASE);
    return 0;
}

static void set_words(Entry *entry, uint64_t number)
{
    for (int i = 0; i < entry->words; i++) {
        Words *word = &entry->word[i];
        uint32_t value = word->base + word->per_call * (uint32_t)number;
        char *place = word->first;
        for (Py_ssize_t n = 0; n < word->count; n++, place += word->stride)
            memcpy(place, &value, sizeof value);
    }
}

static int call_driver(const Step *step)
{
    const U *a = step->arguments;
    void *f = step->function;
    switch (step->count) {
    case 0: return ((int (*)(void))f)();
    case 1: return ((int (*)(U))f)(a[0]);
    case 2: return ((int (*)(U, U))f)(a[0], a[1]);
    case 3: return ((int (*)(U, U, U))f)(a[0], a[1], a[2]);
    case 4: return ((int (*)(U, U, U, U))f)(a[0], a[1], a[2], a[3]);
    case 5: return ((int (*)(U, U, U, U, U))f)(a[0], a[1], a[2], a[3], a[4]);
    case 6: return ((int (*)(U, U, U, U, U, U))f)(a[0], a[1], a[2], a[3], a[4], a[5]);
    case 7: return ((int (*)(U, U, U, U, U, U, U))f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6]);
    default: return ((int (*)(U, U, U, U, U, U, U, U))f)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
    }
}

/* Run the steps; `failed` is told of what the driver refused, or of what a Python step raised, and raises. */
static int submit(Entry *entry)
{
    int refused = 0, i = 0;
    while (i < entry->steps && !refused) {
        if (entry->step[i].callable == NULL) {
            Py_BEGIN_ALLOW_THREADS
            for (; i < entry->steps && entry->step[i].callable == NULL && !refused; i++)
                refused = call_driver(&entry->step[i]);
            Py_END_ALLOW_THREADS
        } else {
            PyObject *result = PyObject_CallObject(entry->step[i].callable, entry->step[i].tuple);
            if (result == NULL) {
                PyObject *type, *error, *trace;
                PyErr_Fetch(&type, &error, &trace);
                PyErr_NormalizeException(&type, &error, &trace);
                if (trace != NULL)
                    PyException_SetTraceback(error, trace);
                PyObject *done = PyObject_CallFunction(entry->failed, "iO", i, error);
                Py_XDECREF(type);
                Py_XDECREF(error);
                Py_XDECREF(trace);
                Py_XDECREF(done);
                if (done != NULL)
                    PyErr_SetString(PyExc_SystemError, "a failed call was not raised");
                return -1;
            }
            refused = result == Py_None ? 0 : (int)PyLong_AsLong(result);
            Py_DECREF(result);
            i++;
        }
    }
    if (!refused)
        return 0;
    PyErr_Clear();
    PyObject *done = PyObject_CallFunction(entry->failed, "ii", i - 1, refused);
    Py_XDECREF(done);
    if (done != NULL)
        PyErr_SetString(PyExc_SystemError, "a failed call was not raised");
    return -1;
}

static int take_note(const Note *note, PyObject *number)
{
    PyObject *value = NULL, *done = NULL;
    int failed = -1;
    switch (note->what) {
    case SET:
        return PyObject_SetAttr(note->target, note->name, note->value);
    case SET_NUMBER:
        return PyObject_SetAttr(note->target, note->name, number);
    case SET_PAIR:
        value = PyTuple_Pack(2, number, note->value);
        failed = value == NULL ? -1 : PyObject_SetAttr(note->target, note->name, value);
        break;
    case APPEND_PAIR:
        value = PyTuple_Pack(2, number, note->value);
        done = value == NULL ? NULL : PyObject_CallOneArg(note->target, value);
        failed = done == NULL ? -1 : 0;
        break;
    case COUNT: {
        if (PyList_GET_SIZE(note->target) < 1)
            return PyErr_SetString(PyExc_IndexError, "a tally is empty"), -1;
        long long count = PyLong_AsLongLong(PyList_GET_ITEM(note->target, 0));
        value = count == -1 ? NULL : PyLong_FromLongLong(count + 1);
        return value == NULL ? -1 : PyList_SetItem(note->target, 0, value); /* which takes the reference */
    }
    default:
        break;
    }
    Py_XDECREF(value);
    Py_XDECREF(done);
    return failed;
}

/* The next number; NULL if there is none left, so that Python must see to more, or with an error set. */
static PyObject *take_number(Replay *self)
{
    PyObject *numbers = PyObject_GetAttr(self->counter, self->counter_name), *number = NULL;
    if (numbers != NULL && PyIter_Check(numbers))
        number = PyIter_Next(numbers);
    else if (numbers != NULL)
        PyErr_SetString(PyExc_TypeError, "run: the numbers of calls are to be an iterator");
    Py_XDECREF(numbers);
    return number;
}

/* Everything from the number to the notes, with the lock of the executor held. 1: there was no number, nothing is done. */
static int repeat(Replay *self, Entry *entry, const Request *request, PyObject *written)
{
    PyObject *number = take_number(self);
    if (number == NULL)
        return PyErr_Occurred() ? -1 : 1;
    uint64_t value = PyLong_AsUnsignedLongLong(number);
    int failed = PyErr_Occurred() != NULL || post_number(self, entry, number, value);
    if (!failed)
        set_words(entry, value);
    for (int i = 0; i < entry->shape.followers; i++) {
        const Follower *follower = &entry->shape.follower[i];
        *follower->where = request->tensor[follower->tensor].address + follower->delta;
    }
    failed = failed || submit(entry);
    self->made += !failed;
    for (int i = 0; i < entry->notes && !failed; i++)
        failed = take_note(&entry->note[i], number);
    Py_DECREF(number);
    if (failed)
        return -1;
    if (written == Py_None)
        return 0;
    PyObject *tuple = PyTuple_Check(written) ? Py_NewRef(written) : PyTuple_Pack(1, written), *done = NULL;
    if (tuple != NULL)
        done = PyObject_CallOneArg(self->count_version, tuple);
    Py_XDECREF(tuple);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* What became of an attempt: it was made, it is not remembered, it cannot be made now, an error is set. */
enum Outcome { MADE, UNKNOWN, NOT_NOW, ERROR };

/* A call that is to be made: remembered by its request, or by Python, which holds its entry. */
typedef struct {
    const Request *request;
    PyObject *tensors, *written; /* one tensor or a tuple, of which autograd is told, or None */
    Entry *entry;
    PyObject *guards; /* of the entry */
    Mark *mark; /* of a call aside; NULL for one on its caller's stream */
} Call;

static int refuse(const char *name, int error)
{
    PyErr_Format(PyExc_RuntimeError, "%s: the driver refused it (error %d)", name, error);
    return -1;
}

/* Record the end of what a stream has so far. 0, or -1 with an error set. */
static int set_mark(Mark *self, long long stream)
{
    int refused;
    Py_BEGIN_ALLOW_THREADS
    refused = self->replay->streams.record(self->event, (U)stream);
    Py_END_ALLOW_THREADS
    return refused ? refuse("cuEventRecord", refused) : 0;
}

PyDoc_STRVAR(follow_doc, "follow()\n--\n\nLet the current stream wait for the call. True if that is the one it was "
                         "called on; None, with nothing done, if a call has failed or another device is current.");

static PyObject *mark_follow(Mark *self, PyObject *unused)
{
    Replay *replay = self->replay;
    PyObject *guards = replay->guards; /* the last one is for failures */
    int refused, open = PyTuple_GET_SIZE(guards) ? passes(PyTuple_GET_ITEM(guards, PyTuple_GET_SIZE(guards) - 1)) : 1;
    if (open == 1)
        open = number_from(PyObject_CallNoArgs(replay->current_device)) == replay->index_value;
    long long stream = open == 1 ? number_from(PyObject_CallOneArg(replay->stream_of, replay->index)) : -1;
    if (PyErr_Occurred())
        return NULL;
    if (stream == -1)
        return Py_NewRef(Py_None);
    Py_BEGIN_ALLOW_THREADS
    refused = replay->streams.wait((U)stream, self->event, 0);
    Py_END_ALLOW_THREADS
    return refused && refuse("cuStreamWaitEvent", refused) ? NULL : PyBool_FromLong(stream == self->caller);
}

static PyObject *mark_query(Mark *self, PyObject *unused)
{
    int answer = self->replay->streams.query(self->event);
    return answer && answer != NOT_READY && refuse("cuEventQuery", answer) ? NULL : PyBool_FromLong(!answer);
}

static void mark_dealloc(Mark *self)
{
    if (self->event)
        leave_event(self->replay, self->event);
    Py_DECREF(self->replay);
    PyObject_Free(self);
}

static PyMethodDef mark_methods[] = {
    {"follow", (PyCFunction)mark_follow, METH_NOARGS, follow_doc},
    {"query", (PyCFunction)mark_query, METH_NOARGS, "Return whether the call has ended."},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject MarkType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sidelane.native.Mark",
    .tp_doc = "The end of a call on another stream than its caller's; Replay.run makes it.",
    .tp_basicsize = sizeof(Mark),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)mark_dealloc,
    .tp_methods = mark_methods,
};

/* With the lock of the executor held, which whoever changes what is asked here holds too, or the GIL. */
static enum Outcome attempt(Replay *self, const Call *call)
{
    int open = is_open(self); /* a forked copy may not even ask for its device */
    if (open != 1)
        return open < 0 ? ERROR : NOT_NOW;
    Way way;
    if (!find_way(self, call->request->aside, &way))
        return PyErr_Occurred() ? ERROR : NOT_NOW;
    Entry *entry = find_there(self, call->request, call->tensors, way.run);
    if (entry == NULL && !PyErr_Occurred())
        entry = find_shape(self, call->request, call->tensors, way.run);
    if (entry == NULL)
        return PyErr_Occurred() ? ERROR : UNKNOWN;
    /* some calls early, since calls that are refused take numbers that are not begun */
    open = !is_unread(self, *self->begun + 1 + (uint64_t)self->record_count / 8);
    open = open && !PyErr_Occurred() && order(self, &way);
    if (open && call->mark != NULL)
        call->mark->caller = way.caller, open = (call->mark->event = take_event(self)) != 0;
    int repeated = open ? repeat(self, entry, call->request, call->written) : 1;
    if (!repeated && call->mark != NULL)
        repeated = set_mark(call->mark, way.run);
    leave_entry(entry);
    return repeated < 0 || PyErr_Occurred() ? ERROR : repeated ? NOT_NOW : MADE;
}

/* A new tuple of all tensors, where a call has lists of one length; NULL where it has anything else, or with an error. */
static PyObject *line_up(PyObject *columns)
{
    PyObject *all = NULL;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(columns); i++) {
        PyObject *column = PyTuple_GET_ITEM(columns, i);
        if (!PyList_Check(column) && !PyTuple_Check(column)) {
            Py_XDECREF(all);
            return NULL;
        }
        PyObject *longer = NULL, *tensors = PySequence_Tuple(column); /* which nobody changes meanwhile */
        if (tensors != NULL && (all == NULL || PyTuple_GET_SIZE(tensors) * i == PyTuple_GET_SIZE(all)))
            longer = all == NULL ? Py_NewRef(tensors) : PySequence_Concat(all, tensors);
        Py_XDECREF(tensors);
        Py_XDECREF(all);
        if (longer == NULL)
            return NULL;
        all = longer;
    }
    return all;
}

/* Make a call with the lock of the executor held. A new reference to True; with nothing done, to False where it is not
   remembered, and to None where it cannot be made now. */
static PyObject *run_locked(Replay *self, enum Outcome (*make)(Replay *, const Call *), const Call *call)
{
    PyObject *without_blocking[] = {Py_False};
    int locked = is_true(PyObject_Vectorcall(self->try_lock, without_blocking, 1, NULL));
    if (locked != 1)
        return locked < 0 ? NULL : Py_NewRef(Py_None);
    enum Outcome outcome = make(self, call);
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyObject *unlocked = PyObject_CallNoArgs(self->unlock);
    Py_XDECREF(unlocked);
    if (outcome == ERROR)
        PyErr_Restore(type, error, trace);
    if (outcome == ERROR || unlocked == NULL)
        return NULL;
    return Py_NewRef(outcome == MADE ? Py_True : outcome == UNKNOWN ? Py_False : Py_None);
}

/* Look at all tensors and make the call again. A new reference. */
static PyObject *look_and_run(Replay *self, Request *request, PyObject *tensors, PyObject *written)
{
    Tensor room[MOST_TENSORS];
    memset(room, 0, 2 * sizeof *room);
    request->tensors = PyTuple_GET_SIZE(tensors), request->tensor = room;
    int known = request->tensors >= 1 && request->tensors <= MOST_TENSORS;
    for (Py_ssize_t i = 0; i < request->tensors && known == 1; i++)
        known = look_at(PyTuple_GET_ITEM(tensors, i), self->tensor_type, &room[i]);
    if (known < 0 && PyErr_ExceptionMatches(PyExc_Exception))
        PyErr_Clear(); /* Python will find the same, and say so in its own words */
    if (known != 1)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    Mark *mark = request->aside ? PyObject_New(Mark, &MarkType) : NULL;
    if (mark != NULL)
        mark->replay = (Replay *)Py_NewRef(self), mark->event = 0;
    else if (request->aside)
        return NULL;
    Call call = {request, tensors, written, NULL, NULL, mark};
    PyObject *made = run_locked(self, attempt, &call);
    if (made != Py_True || mark == NULL) {
        Py_XDECREF(mark);
        return made;
    }
    Py_DECREF(made);
    return (PyObject *)mark;
}

PyDoc_STRVAR(run_doc, "run(kind, tensors, details, variant, beside, aside=0)\n--\n\n"
                      "Repeat a remembered call, of tensors or of lists of them, what it writes first. With nothing done: "
                      "False if it is not one, None if it is not its time. With `aside`, a stream or 0 for the caller's, "
                      "autograd is not told of what is written; a call on such a stream returns its mark.");

static PyObject *replay_run(Replay *self, PyObject *const *arguments, Py_ssize_t count)
{
    if (self->keep == NULL || count < 5 || count > 6 || !PyTuple_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "run: kind, a tuple of tensors, details, variant and beside are needed");
        return NULL;
    }
    long long aside = count == 6 ? PyLong_AsLongLong(arguments[5]) : 0;
    if (aside == -1 && PyErr_Occurred())
        return NULL;
    PyObject *given = arguments[1];
    Request request = {arguments[0], arguments[2], arguments[3], arguments[4], aside, 0, 0, NULL};
    PyObject *first = PyTuple_GET_SIZE(given) ? PyTuple_GET_ITEM(given, 0) : Py_None;
    if (!PyList_Check(first) && !PyTuple_Check(first))
        return look_and_run(self, &request, given, count == 6 ? Py_None : first);
    PyObject *tensors = line_up(given);
    if (tensors == NULL) {
        if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
            return NULL;
        PyErr_Clear();
        return Py_NewRef(Py_False);
    }
    request.lists = (int)PyTuple_GET_SIZE(given);
    PyObject *written = PyTuple_GetSlice(tensors, 0, PyTuple_GET_SIZE(tensors) / request.lists);
    PyObject *made = written == NULL ? NULL : look_and_run(self, &request, tensors, count == 6 ? Py_None : written);
    Py_XDECREF(written);
    Py_DECREF(tensors);
    return made;
}

/* --- launches of kernels ------------------------------------------------------------------------------------------ */

/* A launch that is made again on other tensors. Python has seen that these have the layouts of those before
   (sidelane.session.own_kernel); their types, and their addresses modulo UNIT, are compared here. */
typedef struct {
    PyObject_HEAD
    Replay *replay;
    Entry *entry; /* of whose tensors `dtype` is the type */
    PyObject *guards;
} Launch;

static PyTypeObject LaunchType;

static int read_tensors(Entry *entry, PyObject *tensors)
{
    Request *request = &entry->request;
    request->tensors = PyTuple_GET_SIZE(tensors);
    request->tensor = PyMem_Calloc(request->tensors + 1, sizeof(Tensor));
    entry->shape.follower = PyMem_Calloc(request->tensors + 1, sizeof(Follower));
    if (request->tensor == NULL || entry->shape.follower == NULL)
        return PyErr_NoMemory(), -1;
    for (int i = 0; i < request->tensors; i++) {
        unsigned long long address, word;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(tensors, i), "OKK", &request->tensor[i].dtype, &address, &word))
            return -1;
        request->tensor[i].address = address % UNIT;
        if (word)
            entry->shape.follower[entry->shape.followers++] = (Follower){i, 0, (uint64_t *)(uintptr_t)word};
    }
    return 0;
}

PyDoc_STRVAR(launch_doc, "launch(stream, signature, payload, steps, notes, failed, guards, tensors)\n--\n\n"
                         "Return a launch that can be made again; see sidelane.collectives.repeat.");

static PyObject *replay_launch(Replay *self, PyObject *all)
{
    PyObject *steps, *notes, *guards, *tensors;
    Entry *entry = PyMem_Calloc(1, sizeof(Entry));
    if (entry == NULL)
        return PyErr_NoMemory();
    entry->keep = Py_NewRef(all);
    if (!PyArg_ParseTuple(all, "LOSO!O!OO!O!", &entry->stream, &entry->signature, &entry->payload, &PyTuple_Type, &steps,
                          &PyTuple_Type, &notes, &entry->failed, &PyTuple_Type, &guards, &PyTuple_Type, &tensors))
        goto fail;
    if (PyBytes_GET_SIZE(entry->payload) > self->room || PyTuple_GET_SIZE(tensors) > MOST_TENSORS) {
        PyErr_Format(PyExc_ValueError, "launch: bytes of a payload, tensors (value=%zd, %zd, allowed=..%zd, ..%d)",
                     PyBytes_GET_SIZE(entry->payload), PyTuple_GET_SIZE(tensors), self->room, MOST_TENSORS);
        goto fail;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(guards); i++)
        if (!is_guard(PyTuple_GET_ITEM(guards, i)))
            goto fail;
    if (read_steps(entry, steps) || read_notes(entry, notes) || read_tensors(entry, tensors))
        goto fail;
    Launch *launch = PyObject_GC_New(Launch, &LaunchType);
    if (launch == NULL)
        goto fail;
    launch->replay = (Replay *)Py_NewRef(self), launch->entry = entry, launch->guards = guards;
    PyObject_GC_Track(launch);
    return (PyObject *)launch;
fail:
    free_entry(entry);
    return NULL;
}

static enum Outcome attempt_launch(Replay *self, const Call *call)
{
    int open = is_open(self);
    if (open == 1)
        open = all_pass(call->guards);
    if (open != 1)
        return open < 0 ? ERROR : NOT_NOW;
    Way way;
    if (!find_way(self, 0, &way))
        return PyErr_Occurred() ? ERROR : NOT_NOW;
    if (way.run != call->entry->stream)
        return UNKNOWN;
    open = !is_unread(self, *self->begun + 1 + (uint64_t)self->record_count / 8); /* as in `attempt` */
    int repeated = open && !PyErr_Occurred() && order(self, &way) ? repeat(self, call->entry, call->request, Py_None) : 1;
    return repeated < 0 || PyErr_Occurred() ? ERROR : repeated ? NOT_NOW : MADE;
}

PyDoc_STRVAR(launch_run_doc, "run(*tensors)\n--\n\n"
                             "Launch it on tensors, or None where there was none. With nothing done: False if they are of "
                             "other types or alignments or it is another stream, None if it is not its time.");

static PyObject *launch_run(Launch *self, PyObject *const *tensors, Py_ssize_t count)
{
    const Request *known = &self->entry->request;
    Tensor room[MOST_TENSORS];
    if (count != known->tensors)
        return PyErr_Format(PyExc_TypeError, "run: tensors (value=%zd, allowed=%zd)", count, known->tensors);
    for (Py_ssize_t i = 0; i < count; i++) {
        if ((PyObject *)Py_TYPE(tensors[i]) != known->tensor[i].dtype)
            return Py_NewRef(Py_False);
        room[i].address = 0;
        if (tensors[i] == Py_None)
            continue;
        if (unsigned_from(ask(tensors[i], n_data_ptr), &room[i].address)) {
            if (!PyErr_ExceptionMatches(PyExc_Exception))
                return NULL;
            PyErr_Clear(); /* as in `look_and_run` */
            return Py_NewRef(Py_False);
        }
        if (!room[i].address || room[i].address % UNIT != known->tensor[i].address)
            return Py_NewRef(Py_False);
    }
    Request request = {.tensors = count, .tensor = room};
    Call call = {&request, NULL, Py_None, self->entry, self->guards, NULL};
    return run_locked(self->replay, attempt_launch, &call);
}

static int launch_traverse(Launch *self, visitproc visit, void *arg)
{
    Py_VISIT(self->replay);
    Py_VISIT(self->entry->keep);
    return 0;
}

static void launch_dealloc(Launch *self)
{
    PyObject_GC_UnTrack(self);
    free_entry(self->entry);
    Py_DECREF(self->replay);
    PyObject_GC_Del(self);
}

static PyMethodDef launch_methods[] = {
    {"run", (PyCFunction)(void (*)(void))launch_run, METH_FASTCALL, launch_run_doc},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject LaunchType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sidelane.native.Launch",
    .tp_doc = "A launch of a kernel that is made again; Replay.launch makes it.",
    .tp_basicsize = sizeof(Launch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = (destructor)launch_dealloc,
    .tp_traverse = (traverseproc)launch_traverse,
    .tp_methods = launch_methods,
};

/* --- the type ----------------------------------------------------------------------------------------------------- */

static int read_records(Replay *self, PyObject *words)
{
    self->record_count = PyTuple_GET_SIZE(self->records);
    if (self->record_count < 1 || self->record_count != PyTuple_GET_SIZE(words)) {
        PyErr_SetString(PyExc_ValueError, "Replay: every record has its words, and there is one at least");
        return -1;
    }
    PyObject *room = PyObject_GetAttrString(PyTuple_GET_ITEM(self->records, 0), "room");
    self->room = room == NULL ? -1 : PyLong_AsSsize_t(room);
    Py_XDECREF(room);
    if (PyErr_Occurred())
        return -1;
    self->record_words = PyMem_Calloc(self->record_count, sizeof(uint64_t *));
    if (self->record_words == NULL)
        return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < self->record_count; i++)
        self->record_words[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(words, i));
    return PyErr_Occurred() ? -1 : 0;
}

static int replay_init(Replay *self, PyObject *all, PyObject *keywords)
{
    PyObject *words, *owner; /* of the functions, kept like everything */
    Streams *streams = &self->streams;
    unsigned long long begun;
    if (self->keep != NULL || self->record_words != NULL || (keywords != NULL && PyDict_GET_SIZE(keywords))) {
        PyErr_SetString(PyExc_TypeError, "Replay: made once, with positional arguments");
        return -1;
    }
    if (!PyArg_ParseTuple(all, "O!OOOOO!(OO)(OO)O!O!KOOOOOOO|(OKKKKKK)", &PyTuple_Type, &self->guards, &self->stream_of,
                          &self->capturing, &self->current_device, &self->index, &PyList_Type, &self->generation,
                          &self->last, &self->last_name, &self->counter, &self->counter_name, &PyTuple_Type, &self->records, &PyTuple_Type,
                          &words, &begun, &self->control, &self->post, &self->post_lock, &self->try_lock, &self->unlock,
                          &self->count_version, &self->tensor_type, &owner, &streams->record, &streams->wait,
                          &streams->query, &streams->create, &streams->destroy, &streams->capturing))
        return -1;
    self->begun = (uint64_t *)(uintptr_t)begun;
    self->index_value = PyLong_AsLongLong(self->index);
    if (PyErr_Occurred())
        return -1;
    if (!PyType_Check(self->tensor_type) || !PyList_GET_SIZE(self->generation)) {
        PyErr_SetString(PyExc_TypeError, "Replay: a type of tensors and a generation are needed");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->guards); i++)
        if (!is_guard(PyTuple_GET_ITEM(self->guards, i)))
            return -1;
    if (read_records(self, words))
        return -1;
    self->keep = Py_NewRef(all);
    return 0;
}

static int replay_traverse(Replay *self, visitproc visit, void *arg)
{
    Py_VISIT(self->keep);
    for (int i = 0; i < TABLE; i++)
        if (self->table[i] != NULL)
            Py_VISIT(self->table[i]->keep);
    return 0;
}

static PyObject *replay_clear_table(Replay *self, PyObject *unused)
{
    for (int i = 0; i < TABLE; i++) {
        Entry *entry = self->table[i];
        self->table[i] = NULL;
        if (entry != NULL)
            free_entry(entry);
    }
    Py_RETURN_NONE;
}

static int replay_clear(Replay *self)
{
    Py_XDECREF(replay_clear_table(self, NULL)); /* `keep` stays: a run may be under way, and no cycle needs it broken */
    return 0;
}

static void replay_dealloc(Replay *self)
{
    PyObject_GC_UnTrack(self);
    replay_clear(self);
    while (self->spares)
        self->streams.destroy(self->spare[--self->spares]);
    Py_CLEAR(self->keep);
    PyMem_Free(self->record_words);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *replay_count(Replay *self, void *unused)
{
    long count = 0;
    for (int i = 0; i < TABLE; i++)
        count += self->table[i] != NULL;
    return PyLong_FromLong(count);
}

static PyObject *replay_made(Replay *self, void *unused) { return PyLong_FromUnsignedLongLong(self->made); }

static PyMethodDef replay_methods[] = {
    {"remember", (PyCFunction)replay_remember, METH_VARARGS, remember_doc},
    {"run", (PyCFunction)(void (*)(void))replay_run, METH_FASTCALL, run_doc},
    {"launch", (PyCFunction)replay_launch, METH_VARARGS, launch_doc},
    {"forget", (PyCFunction)replay_clear_table, METH_NOARGS, "Forget every call."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef replay_properties[] = {
    {"remembered", (getter)replay_count, NULL, "How many calls are remembered.", NULL},
    {"made", (getter)replay_made, NULL, "How many calls and launches were made.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyTypeObject ReplayType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "sidelane.native.Replay",
    .tp_doc = "The calls of one communicator that repeat; see sidelane.collectives.repeat, which makes the arguments.",
    .tp_basicsize = sizeof(Replay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)replay_init,
    .tp_dealloc = (destructor)replay_dealloc,
    .tp_traverse = (traverseproc)replay_traverse,
    .tp_clear = (inquiry)replay_clear,
    .tp_methods = replay_methods,
    .tp_getset = replay_properties,
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "sidelane_replay", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_sidelane_replay(void)
{
    struct {
        PyObject **object;
        const char *text;
    } names[] = {{&n_get_device, "get_device"}, {&n_untyped_storage, "untyped_storage"}, {&n_cdata, "_cdata"}, {&n_data_ptr, "data_ptr"}, {&n_nbytes, "nbytes"}, {&n_dtype, "dtype"},
                 {&n_is_contiguous, "is_contiguous"}, {&n_is_neg, "is_neg"}, {&n_locked, "locked"},
                 {&n_written, "written"}, {&n_status, "status"}, {&n_digest, "digest"}, {&n_unread, "unread"}};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if ((*names[i].object = PyUnicode_InternFromString(names[i].text)) == NULL)
            return NULL;
    if (PyType_Ready(&ReplayType) < 0 || PyType_Ready(&LaunchType) < 0 || PyType_Ready(&MarkType) < 0)
        return NULL;
    make_crc_table();
    PyObject *module = PyModule_Create(&definition);
    const char *effects[] = {"SET", "SET_NUMBER", "SET_PAIR", "APPEND_PAIR", "COUNT"};
    for (int i = 0; module != NULL && i < EFFECTS; i++)
        if (PyModule_AddIntConstant(module, effects[i], i) < 0)
            Py_CLEAR(module);
    if (module != NULL && PyModule_AddIntConstant(module, "MOST_ARGUMENTS", MOST_ARGUMENTS) < 0)
        Py_CLEAR(module);
    if (module != NULL && PyModule_AddIntConstant(module, "UNIT", UNIT) < 0)
        Py_CLEAR(module);
    if (module != NULL && PyModule_AddIntConstant(module, "MOST_TENSORS", MOST_TENSORS) < 0)
        Py_CLEAR(module);
    if (module != NULL && PyModule_AddObjectRef(module, "Replay", (PyObject *)&ReplayType) < 0)
        Py_CLEAR(module);
    return module;
}
