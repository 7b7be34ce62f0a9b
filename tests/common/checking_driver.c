/* A libcuda.so.1 that runs nothing and checks everything: each address that it is given must lie in memory that a test
   allows, and each event and graph must be one that was made and not destroyed. What a graph holds is checked again at
   every launch, and must lie in the same allocations as when it was recorded. Only what Sidelane calls is here; of what is not checked, success is claimed. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Address;
enum { FREED, EVENT, GRAPH, EXECUTABLE, MOST_HANDLES = 1 << 20, MOST_RANGES = 1 << 16, FIRST_HANDLE = 0x1000 };

typedef struct {
    Address first;
    uint64_t bytes, number; /* of the allocation */
} Range;

typedef struct {
    Range *ranges;
    size_t count, room;
} Recording;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Range allowed[MOST_RANGES];
static size_t allowed_count, handle_count;
static uint64_t allocations;
static unsigned char kinds[MOST_HANDLES];
static Recording *recordings[MOST_HANDLES], *recording;
static uint64_t checks, violations;
static char doing[512];

/* --- for the test -------------------------------------------------------------------------------------------------- */

void checker_allow(Address first, uint64_t bytes)
{
    pthread_mutex_lock(&mutex);
    if (allowed_count < MOST_RANGES)
        allowed[allowed_count++] = (Range){first, bytes, ++allocations};
    pthread_mutex_unlock(&mutex);
}

void checker_forbid(Address first)
{
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < allowed_count; i++)
        if (allowed[i].first == first) {
            allowed[i] = allowed[--allowed_count];
            break;
        }
    pthread_mutex_unlock(&mutex);
}

/* As if it had been freed, and given out again at the same place. */
void checker_renew(Address first)
{
    pthread_mutex_lock(&mutex);
    for (size_t i = 0; i < allowed_count; i++)
        if (allowed[i].first == first)
            allowed[i].number = ++allocations;
    pthread_mutex_unlock(&mutex);
}

void checker_doing(const char *text) { snprintf(doing, sizeof doing, "%s", text); }
uint64_t checker_checks(void) { return checks; }
uint64_t checker_violations(void) { return violations; }

static void complain(const char *what, uint64_t where, uint64_t more)
{
    if (violations++ < 10)
        fprintf(stderr, "VIOLATION: %s 0x%llx (%llu) in %s\n", what, (unsigned long long)where,
                (unsigned long long)more, doing);
}

static const Range *range_of(Address first, uint64_t bytes)
{
    for (size_t i = 0; i < allowed_count; i++)
        if (first >= allowed[i].first && first + bytes <= allowed[i].first + allowed[i].bytes)
            return &allowed[i];
    return NULL;
}

static int touch(const char *what, Address first, uint64_t bytes)
{
    if (!bytes)
        return 0;
    pthread_mutex_lock(&mutex);
    checks++;
    const Range *range = range_of(first, bytes);
    if (range == NULL)
        complain(what, first, bytes);
    if (recording != NULL) {
        if (recording->count == recording->room) {
            recording->room = 2 * recording->room + 16;
            recording->ranges = realloc(recording->ranges, recording->room * sizeof(Range));
        }
        recording->ranges[recording->count++] = (Range){first, bytes, 0};
    }
    pthread_mutex_unlock(&mutex);
    return range != NULL;
}

/* One end of a copy. In a graph it belongs to an allocation; what a kernel is told is a number like any other. */
static void touch_copied(const char *what, Address first, uint64_t bytes)
{
    touch(what, first, bytes);
    pthread_mutex_lock(&mutex);
    const Range *range = range_of(first, bytes);
    if (recording != NULL && bytes && range != NULL)
        recording->ranges[recording->count - 1].number = range->number;
    pthread_mutex_unlock(&mutex);
}

static uint64_t make(int kind)
{
    pthread_mutex_lock(&mutex);
    size_t number = handle_count < MOST_HANDLES - 1 ? handle_count++ : handle_count;
    kinds[number] = (unsigned char)kind;
    pthread_mutex_unlock(&mutex);
    return FIRST_HANDLE + 16 * number;
}

static size_t number_of(uint64_t handle) { return (handle - FIRST_HANDLE) / 16; }

static int is_live(const char *what, uint64_t handle, int kind, int after)
{
    pthread_mutex_lock(&mutex);
    checks++;
    int live = handle >= FIRST_HANDLE && number_of(handle) < handle_count && kinds[number_of(handle)] == kind;
    if (live)
        kinds[number_of(handle)] = (unsigned char)after;
    else
        complain(what, handle, (uint64_t)kind);
    pthread_mutex_unlock(&mutex);
    return live;
}

static Result use(const char *what, uint64_t handle, int kind) { return is_live(what, handle, kind, kind), 0; }
static Result end(const char *what, uint64_t handle, int kind) { return is_live(what, handle, kind, FREED), 0; }

/* --- the driver ---------------------------------------------------------------------------------------------------- */

static Result succeed(void) { return 0; }
Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Result cuCtxGetCurrent(uint64_t *context) { return *context = 0x77, 0; }
Result cuCtxGetStreamPriorityRange(int *low, int *high) { return *low = 0, *high = -5, 0; }
Result cuCtxGetDevice(int *device) { return *device = 0, 0; }
Result cuGetErrorName(int error, const char **name) { return *name = "CUDA_ERROR_CHECKER", 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = attribute == 75 ? 9 : 0, 0; }
Result cuStreamCreateWithPriority(uint64_t *stream, unsigned flags, int priority) { return *stream = make(FREED), 0; }
Result cuStreamGetPriority(void *stream, int *priority) { return *priority = 0, 0; }
Result cuStreamIsCapturing(void *stream, int *status) { return *status = 0, 0; }
Result cuModuleLoadData(uint64_t *module, void *image) { return *module = make(FREED), 0; }
Result cuModuleGetFunction(uint64_t *function, void *module, char *name) { return *function = make(FREED), 0; }

Result cuEventCreate(uint64_t *event, unsigned flags) { return *event = make(EVENT), 0; }
Result cuEventDestroy_v2(uint64_t event) { return end("event destroyed", event, EVENT); }
Result cuEventRecord(uint64_t event, void *stream) { return use("event recorded", event, EVENT); }
Result cuStreamWaitEvent(void *stream, uint64_t event, unsigned flags) { return use("event waited for", event, EVENT); }

Result cuMemcpyAsync(Address to, Address from, size_t bytes, void *stream)
{
    return touch_copied("copy to", to, bytes), touch_copied("copy from", from, bytes), 0;
}

Result cuMemcpyBatchAsync_v2(Address *to, Address *from, size_t *bytes, size_t count, void *attributes, size_t *places,
                             size_t attribute_count, void *stream)
{
    for (size_t i = 0; i < count; i++)
        touch_copied("copy to", to[i], bytes[i]), touch_copied("copy from", from[i], bytes[i]);
    if (attributes == NULL || attribute_count != 1 || places[0] != 0)
        complain("attributes of a batch", (uint64_t)attributes, attribute_count);
    return 0;
}

typedef struct {
    size_t x, y;
    unsigned memory;
    Address host, device, array;
    size_t pitch;
} Side;

typedef struct {
    Side from, to;
    size_t width, height;
} Rows;

Result cuMemcpy2DAsync_v2(const Rows *copy, void *stream)
{
    if (copy->from.memory != 2 || copy->to.memory != 2)
        complain("memory of rows", copy->from.memory, copy->to.memory);
    for (size_t row = 0; row < copy->height; row++) {
        touch_copied("row to", copy->to.device + row * copy->to.pitch, copy->width);
        touch_copied("row from", copy->from.device + row * copy->from.pitch, copy->width);
    }
    return 0;
}

typedef struct {
    uint32_t kind, unused;
    Address address;
    uint32_t value, high, flags, padding;
    uint64_t more[2];
} MemoryOp;

Result cuStreamBatchMemOp_v2(void *stream, unsigned count, const MemoryOp *ops, unsigned flags)
{
    if (count < 1 || count > 255)
        complain("memory operations", count, 0);
    for (unsigned i = 0; i < count; i++) {
        if (ops[i].kind != 1 && ops[i].kind != 2)
            complain("kind of a memory operation", ops[i].kind, i);
        if (touch("memory operation", ops[i].address, 4) && ops[i].kind == 2)
            *(volatile uint32_t *)ops[i].address = ops[i].value; /* the host waits for some of them */
    }
    return 0;
}

/* What is copied from the host are tables of lists (kernels/list_table.py): ends of pieces, and their rows. */
typedef struct {
    Address first;
    uint64_t bytes;
} Table;
static Table tables[MOST_RANGES];
static size_t table_count;

Result cuMemAlloc_v2(Address *address, size_t bytes)
{
    *address = (Address)calloc(1, bytes);
    checker_allow(*address, bytes);
    return 0;
}

Result cuMemFree_v2(Address address)
{
    touch("memory freed", address, 1);
    checker_forbid(address);
    free((void *)address);
    return 0;
}

enum { BUFFER_ID = 7, RANGE_START_ADDR = 11, RANGE_SIZE = 12, MAPPING_SIZE = 18, MAPPING_BASE_ADDR, MEMORY_BLOCK_ID };

/* Every other allocation is a piece of a range, whose numbers say nothing. */
Result cuMemRetainAllocationHandle(uint64_t *handle, Address address)
{
    pthread_mutex_lock(&mutex);
    const Range *range = range_of(address, 1);
    int is_piece = range != NULL && range->number % 2;
    *handle = is_piece ? range->number : 0;
    pthread_mutex_unlock(&mutex);
    return !is_piece;
}

Result cuMemRelease(uint64_t handle)
{
    if (!handle)
        complain("handle of a piece", handle, 0);
    return 0;
}

Result cuPointerGetAttribute(uint64_t *value, int attribute, Address address)
{
    pthread_mutex_lock(&mutex);
    const Range *range = range_of(address, 1);
    int is_size = attribute == RANGE_SIZE || attribute == MAPPING_SIZE;
    int is_start = attribute == RANGE_START_ADDR || attribute == MAPPING_BASE_ADDR;
    if (attribute != BUFFER_ID && attribute != MEMORY_BLOCK_ID && !is_size && !is_start)
        complain("attribute of a pointer", (uint64_t)attribute, address);
    else if (range != NULL && attribute == BUFFER_ID && range->number % 2)
        *value = 1;
    else if (range != NULL)
        *value = is_size ? range->bytes : is_start ? range->first : range->number;
    pthread_mutex_unlock(&mutex);
    return range == NULL;
}

Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t bytes, void *stream)
{
    size_t i = 0;
    while (i < table_count && tables[i].first != to)
        i++;
    if (!touch("table to", to, bytes) || i >= MOST_RANGES)
        return 0;
    memcpy((void *)to, from, bytes);
    tables[i] = (Table){to, bytes};
    table_count += i == table_count;
    return 0;
}

/* Of a table, behind whose address a kernel is told how many tiles there are. */
static void touch_rows(Address address, uint64_t tiles)
{
    static const size_t rooms[] = {16, 128, 1024, 4096};
    for (size_t i = 0; i < table_count; i++) {
        if (tables[i].first != address)
            continue;
        const int64_t *ends = (const int64_t *)address;
        size_t all = tables[i].bytes / 8, pieces = 0, words = 0, room = 0;
        for (size_t n = 0; n < 4 && words != 8 && words != 16 && words != 24; n++) {
            room = rooms[n];
            for (pieces = 0; pieces < room && ends[pieces] < (int64_t)1 << 62;)
                pieces++;
            words = pieces && all > room && (all - room) % pieces == 0 ? (all - room) / pieces : 0;
        }
        if (words != 8 && words != 16 && words != 24)
            complain("words of a row", words, all);
        else if ((uint64_t)ends[pieces - 1] != tiles)
            complain("tiles of a table", (uint64_t)ends[pieces - 1], tiles);
        const int64_t *row = ends + room;
        for (size_t n = 0; n < pieces && words; n++, row += words) {
            touch("input of a list", row[0], row[2]), touch("output of a list", row[1], row[2]);
            for (size_t peer = 8; peer < words; peer++)
                if (row[peer])
                    touch("tensor of a peer", row[peer], row[2]);
        }
    }
}

typedef struct {
    unsigned grid[3], block[3], shared;
    void *stream, *attributes;
    unsigned attribute_count;
} Launch;

Result cuLaunchKernelEx(const Launch *launch, void *function, void **arguments, void **extra)
{
    if (function == NULL || launch->grid[0] < 1 || launch->grid[0] > 1024 || launch->block[0] > 1024)
        complain("launch", (uint64_t)function, launch->grid[0]);
    for (unsigned i = 0; i < launch->shared; i++) { /* the test's kernels say there how many arguments they have */
        Address address = *(const Address *)arguments[i];
        if (address >> 32) /* or else it is a count; some are the end of a buffer */
            touch("argument of a kernel", range_of(address, 1) ? address : address - 1, 1);
        if (i + 1 < launch->shared)
            touch_rows(address, *(const Address *)arguments[i + 1]);
    }
    return 0;
}

Result cuStreamBeginCapture_v2(void *stream, int mode) { return recording = calloc(1, sizeof(Recording)), 0; }

Result cuStreamEndCapture(void *stream, uint64_t *graph)
{
    *graph = make(GRAPH);
    recordings[number_of(*graph)] = recording;
    return recording = NULL, 0;
}

Result cuGraphInstantiateWithFlags(uint64_t *executable, uint64_t graph, unsigned long long flags)
{
    if (!is_live("graph", graph, GRAPH, GRAPH))
        return 1;
    *executable = make(EXECUTABLE);
    recordings[number_of(*executable)] = recordings[number_of(graph)];
    return 0;
}

Result cuGraphDestroy(uint64_t graph) { return end("graph destroyed", graph, GRAPH); }
Result cuGraphExecDestroy(uint64_t executable) { return end("graph destroyed", executable, EXECUTABLE); }

Result cuGraphLaunch(uint64_t executable, void *stream)
{
    if (!is_live("graph launched", executable, EXECUTABLE, EXECUTABLE))
        return 0;
    const Recording *held = recordings[number_of(executable)];
    for (size_t i = 0; held != NULL && i < held->count; i++) {
        const Range *then = &held->ranges[i], *now = range_of(then->first, then->bytes);
        if (touch("memory of a graph", then->first, then->bytes) && then->number && now->number != then->number)
            complain("memory of a graph, freed since", then->first, then->bytes);
    }
    return 0;
}

Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    static void *self;
    Dl_info info;
    if (self == NULL && dladdr((void *)cuInit, &info))
        self = dlopen(info.dli_fname, RTLD_NOW);
    const char *suffixes[] = {"", "_v2", "WithFlags"};
    char name[256];
    *function = NULL;
    for (size_t i = 0; i < 3 && *function == NULL; i++) {
        snprintf(name, sizeof name, "%s%s", symbol, suffixes[i]);
        *function = dlsym(self, name);
    }
    if (*function == NULL)
        *function = (void *)succeed;
    if (status != NULL)
        *status = 0;
    return 0;
}

Result cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}
