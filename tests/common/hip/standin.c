/* A stand-in for the HIP runtime: hardware queues are threads, device memory is host memory, graphs are lists of
 * operations. A stream has a queue of its own, or the streams of a device and a priority share some (standin_share).
 *
 * It has the entry points that sidelane.execute.hip calls, with HIP's prototypes, and does what ROCm's sources say
 * where that differs from CUDA: waits for "at least" compare unsigned numbers, a thread's last error stays until it is
 * read, and memory operations can be told to run at once in a capture (standin_set_early), as older runtimes do. It
 * shares no code with the library.
 *
 * Memory of hipMalloc is a memory file, so that another process maps it through its file descriptor in /proc.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801,
       CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901 };
enum { COPY, COPY_2D, COPY_3D, WRITE, WAIT, RECORD, AWAIT, RUN_GRAPH, ADD };
enum { MOST_STREAMS = 512, MOST_ALLOCATIONS = 4096, MOST_QUEUES = 256 };

typedef struct event {
    pthread_mutex_t lock;
    uint64_t recorded, reached;
    double reached_us;
    void *capture; /* the graph in whose capture it was recorded last */
    int branch;
} event_t;

typedef struct {
    uintptr_t dst, src;
    size_t dst_pitch, src_pitch, dst_height, src_height, width, rows, planes;
} box_t;

typedef struct operation {
    int kind;
    box_t box;
    uint32_t value, comparison, mask;
    event_t *event;
    uint64_t generation;
    struct graph *graph;
    uintptr_t sources[16]; /* of ADD; their number is in value */
    int branch;
    struct stream *stream; /* in which it was submitted */
    struct operation *next;
} operation_t;

typedef struct graph { /* also of an executable one */
    operation_t *first, **last;
    int branches;
    uint64_t number;
    int uses; /* an executable graph may be destroyed while it runs */
    pthread_mutex_t lock;
} graph_t;

typedef struct queue { /* of one stream, or of those of a device and a priority */
    pthread_mutex_t lock;
    pthread_cond_t more;
    operation_t *first, **last;
    int device, priority, streams, stopped, ended;
    atomic_int abandoned; /* what blocks does so no more, and does nothing */
    struct queue *next; /* of all that were made */
} queue_t;

typedef struct stream {
    queue_t *queue;
    uint64_t submitted, done; /* under the queue's lock */
    int priority;
    graph_t *capture;
    int branch;
    uint32_t mask[32];
    unsigned mask_words;
} stream_t;

typedef struct {
    uintptr_t start;
    size_t bytes;
    int file;
    uint64_t number;
} allocation_t;

typedef struct { char reserved[64]; } ipc_handle_t;
typedef struct { void *pointer; size_t pitch, width, height; } pitched_t;
typedef struct {
    void *src_array; size_t src_position[3]; pitched_t src;
    void *dst_array; size_t dst_position[3]; pitched_t dst;
    size_t extent[3]; int kind;
} copy_3d_t;

static pthread_mutex_t global = PTHREAD_MUTEX_INITIALIZER;
static stream_t *streams[MOST_STREAMS];
static queue_t *shared[MOST_QUEUES], *queues;
static allocation_t allocations[MOST_ALLOCATIONS];
static uint64_t numbers = 1;
static atomic_int early, is_ending;
static char failing[64];
static int failure;
static __thread int capture_mode, last_error, shared_device, most_shared;

static int refused(const char *name) {
    int found = SUCCESS;
    pthread_mutex_lock(&global);
    if (failure && !strcmp(failing, name)) {
        found = failure;
        failure = 0;
    }
    pthread_mutex_unlock(&global);
    if (found) last_error = found;
    return found;
}
#define CHECK_REFUSAL() do { int error_ = refused(__func__); if (error_) return error_; } while (0)

void standin_fail_next(const char *name, int error) {
    pthread_mutex_lock(&global);
    snprintf(failing, sizeof failing, "%s", name);
    failure = error;
    pthread_mutex_unlock(&global);
}
void standin_set_early(int value) { early = value; }
/* Streams that this thread makes from now on share hardware queues, so many for each priority; 0: none does. */
void standin_share(int device, int most) {
    shared_device = device;
    most_shared = most;
}
int hipGetLastError(void) {
    int found = last_error;
    last_error = SUCCESS;
    return found;
}
unsigned standin_mask(stream_t *stream, uint32_t *words, unsigned most) {
    for (unsigned i = 0; i < stream->mask_words && i < most; i++) words[i] = stream->mask[i];
    return stream->mask_words;
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

static void pause_a_little(unsigned turn) {
    if (turn < 64) sched_yield();
    else usleep(turn < 1024 ? 50 : 500);
}

/* --- running operations ------------------------------------------------------------------------------------------- */

static void run_graph(graph_t *graph);

static int must_end(operation_t *op) { return is_ending || (op->stream && op->stream->queue->abandoned); }

static void run(operation_t *op) {
    _Atomic uint32_t *word = (_Atomic uint32_t *)op->box.dst;
    if (must_end(op) && op->kind != RUN_GRAPH) return;
    switch (op->kind) {
    case COPY: case COPY_2D: case COPY_3D:
        for (size_t plane = 0; plane < op->box.planes; plane++)
            for (size_t row = 0; row < op->box.rows; row++)
                memmove((char *)op->box.dst + (plane * op->box.dst_height + row) * op->box.dst_pitch,
                        (char *)op->box.src + (plane * op->box.src_height + row) * op->box.src_pitch, op->box.width);
        break;
    case WRITE:
        atomic_store_explicit(word, op->value, memory_order_release);
        break;
    case WAIT:
        for (unsigned turn = 0; !must_end(op); turn++) {
            uint32_t seen = atomic_load_explicit(word, memory_order_acquire) & op->mask;
            if (op->comparison == 0 ? seen >= op->value : seen == op->value) break; /* unsigned, as in amdblit.cl */
            pause_a_little(turn);
        }
        break;
    case RECORD:
        pthread_mutex_lock(&op->event->lock);
        if (op->event->reached < op->generation) op->event->reached = op->generation;
        op->event->reached_us = now_us();
        pthread_mutex_unlock(&op->event->lock);
        break;
    case AWAIT:
        for (unsigned turn = 0; !must_end(op); turn++) {
            pthread_mutex_lock(&op->event->lock);
            int reached = op->event->reached >= op->generation;
            pthread_mutex_unlock(&op->event->lock);
            if (reached) break;
            pause_a_little(turn);
        }
        break;
    case RUN_GRAPH:
        run_graph(op->graph);
        break;
    case ADD:
        for (size_t i = 0; i < op->box.width / 4; i++) {
            uint32_t sum = 0;
            if (op->mask) { /* of floats, divided by this number */
                float total = 0;
                for (uint32_t source = 0; source < op->value; source++) total += ((float *)op->sources[source])[i];
                ((float *)op->box.dst)[i] = total / op->mask;
                continue;
            }
            for (uint32_t source = 0; source < op->value; source++) sum += ((uint32_t *)op->sources[source])[i];
            ((uint32_t *)op->box.dst)[i] = sum;
        }
        break;
    }
}

static void *queue_main(void *argument) {
    queue_t *queue = argument;
    for (;;) {
        pthread_mutex_lock(&queue->lock);
        while (!queue->first && !queue->stopped) pthread_cond_wait(&queue->more, &queue->lock);
        operation_t *op = queue->first;
        if (!op) {
            queue->ended = 1;
            pthread_mutex_unlock(&queue->lock);
            return NULL;
        }
        queue->first = op->next;
        if (!queue->first) queue->last = &queue->first;
        pthread_mutex_unlock(&queue->lock);
        run(op);
        pthread_mutex_lock(&queue->lock);
        op->stream->done++;
        pthread_mutex_unlock(&queue->lock);
        free(op);
    }
}

/* --- graphs: branches run as threads, and an event is a counter of the launch -------------------------------------- */

typedef struct {
    graph_t *graph;
    int branch;
    atomic_int *passed; /* by position in the graph */
} branch_t;

static void *branch_main(void *argument) {
    branch_t *branch = argument;
    int position = 0;
    for (operation_t *op = branch->graph->first; op; op = op->next, position++) {
        if (op->branch != branch->branch) continue;
        if (op->kind == AWAIT) {
            for (unsigned turn = 0; !branch->passed[op->generation] && !must_end(op); turn++) pause_a_little(turn);
        } else if (op->kind != RECORD || op->generation) { /* a record that is a node tells the outside nothing */
            run(op);
        }
        branch->passed[position] = 1;
    }
    return NULL;
}

static void drop_graph(graph_t *graph) {
    pthread_mutex_lock(&graph->lock);
    int left = --graph->uses;
    pthread_mutex_unlock(&graph->lock);
    if (left) return;
    for (operation_t *op = graph->first, *next; op; op = next) {
        next = op->next;
        free(op);
    }
    free(graph);
}

static void run_graph(graph_t *graph) {
    int count = 0;
    for (operation_t *op = graph->first; op; op = op->next) count++;
    atomic_int *passed = calloc(count + 1, sizeof *passed);
    branch_t branches[64];
    pthread_t threads[64];
    for (int i = 0; i < graph->branches; i++) {
        branches[i] = (branch_t){graph, i, passed};
        if (i) pthread_create(&threads[i], NULL, branch_main, &branches[i]);
    }
    branch_main(&branches[0]);
    for (int i = 1; i < graph->branches; i++) pthread_join(threads[i], NULL);
    free(passed);
    drop_graph(graph);
}

static int position_in(graph_t *graph) {
    int count = 0;
    for (operation_t *op = graph->first; op; op = op->next) count++;
    return count;
}

/* --- submission --------------------------------------------------------------------------------------------------- */

static int submit(stream_t *stream, operation_t given) {
    if (!stream) return NOT_SUPPORTED; /* the legacy default stream is not made up */
    operation_t *op = malloc(sizeof *op);
    *op = given;
    op->next = NULL;
    op->stream = stream;
    if (stream->capture) {
        op->branch = stream->branch;
        *stream->capture->last = op;
        stream->capture->last = &op->next;
        return SUCCESS;
    }
    queue_t *queue = stream->queue;
    pthread_mutex_lock(&queue->lock);
    *queue->last = op;
    queue->last = &op->next;
    stream->submitted++;
    pthread_cond_signal(&queue->more);
    pthread_mutex_unlock(&queue->lock);
    return SUCCESS;
}

int hipMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, stream_t *stream) {
    CHECK_REFUSAL();
    if (kind != 1024 && kind != 3 && kind != 4) return INVALID_VALUE;
    return submit(stream, (operation_t){COPY, {(uintptr_t)dst, (uintptr_t)src, 0, 0, 0, 0, bytes, 1, 1}});
}

int hipMemcpyHtoDAsync(void *dst, const void *src, size_t bytes, stream_t *stream) {
    CHECK_REFUSAL();
    void *copy = malloc(bytes + 1);
    memcpy(copy, src, bytes); /* leaks in tests only: the runtime may read pageable memory at once */
    return submit(stream, (operation_t){COPY, {(uintptr_t)dst, (uintptr_t)copy, 0, 0, 0, 0, bytes, 1, 1}});
}

int hipMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t rows,
                     int kind, stream_t *stream) {
    CHECK_REFUSAL();
    if (kind != 3) return INVALID_VALUE; /* hip_conversions.hpp of early runtimes knows no hipMemcpyDeviceToDeviceNoCU */
    if (rows > 1 && (width > dst_pitch || width > src_pitch)) return INVALID_VALUE;
    box_t box = {(uintptr_t)dst, (uintptr_t)src, dst_pitch, src_pitch, 0, 0, width, rows, 1};
    return submit(stream, (operation_t){COPY_2D, box});
}

int hipMemcpy3DAsync(const copy_3d_t *copy, stream_t *stream) {
    CHECK_REFUSAL();
    if (copy->src_array || copy->dst_array || copy->kind != 3) return INVALID_VALUE;
    box_t box = {(uintptr_t)copy->dst.pointer, (uintptr_t)copy->src.pointer, copy->dst.pitch, copy->src.pitch,
                 copy->dst.height, copy->src.height, copy->extent[0], copy->extent[1], copy->extent[2]};
    if (box.width > box.dst_pitch || box.width > box.src_pitch) return INVALID_VALUE;
    return submit(stream, (operation_t){COPY_3D, box});
}

/* What a kernel of int32 would do. */
/* Adds words, or floats whose sum is divided by divisor, if it is not 0. */
int standin_add(void *dst, const uintptr_t *sources, unsigned count, size_t bytes, unsigned divisor, stream_t *stream) {
    operation_t op = {ADD, {(uintptr_t)dst, 0, 0, 0, 0, 0, bytes, 1, 1}, count, 0, divisor};
    if (count > 16) return INVALID_VALUE;
    memcpy(op.sources, sources, count * sizeof *sources);
    return submit(stream, op);
}

static int memory_operation(stream_t *stream, operation_t op) {
    if (!op.box.dst || op.box.dst % 4) return INVALID_VALUE;
    if (stream && stream->capture && early) { /* as a runtime that does not know captures of them */
        if (op.kind == WRITE) run(&op);
        return SUCCESS;
    }
    return submit(stream, op);
}

int hipStreamWriteValue32(stream_t *stream, void *word, uint32_t value, unsigned flags) {
    CHECK_REFUSAL();
    if (flags) return INVALID_VALUE;
    return memory_operation(stream, (operation_t){WRITE, {(uintptr_t)word}, value});
}

int hipStreamWaitValue32(stream_t *stream, void *word, uint32_t value, unsigned comparison, uint32_t mask) {
    CHECK_REFUSAL();
    if (comparison > 1) return INVALID_VALUE;
    return memory_operation(stream, (operation_t){WAIT, {(uintptr_t)word}, value, comparison, mask});
}

/* --- streams and events ------------------------------------------------------------------------------------------- */

static queue_t *make_queue(int priority) {
    pthread_t thread;
    queue_t *queue = calloc(1, sizeof *queue);
    pthread_mutex_init(&queue->lock, NULL);
    pthread_cond_init(&queue->more, NULL);
    queue->last = &queue->first;
    queue->device = shared_device;
    queue->priority = priority;
    if (pthread_create(&thread, NULL, queue_main, queue)) {
        free(queue);
        return NULL;
    }
    pthread_detach(thread);
    queue->next = queues; /* the global lock is held */
    queues = queue;
    return queue;
}

static int has_running(int device) {
    int running = 0;
    pthread_mutex_lock(&global);
    for (queue_t *queue = queues; queue; queue = queue->next) {
        if (queue->device != device) continue;
        pthread_mutex_lock(&queue->lock);
        queue->stopped = 1;
        pthread_cond_signal(&queue->more);
        running |= !queue->ended;
        pthread_mutex_unlock(&queue->lock);
    }
    pthread_mutex_unlock(&global);
    return running;
}

/* End the streams of a device behind what they have. Returns 1, and lets them do nothing more, if that takes longer
 * than the seconds given. */
int standin_stop(int device, unsigned most_s) {
    double until = now_us() + 1e6 * most_s;
    pthread_mutex_lock(&global);
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] && streams[i]->queue->device == device) streams[i] = NULL;
    for (int i = 0; i < MOST_QUEUES; i++)
        if (shared[i] && shared[i]->device == device) shared[i] = NULL;
    pthread_mutex_unlock(&global);
    while (has_running(device) && now_us() < until) usleep(200);
    if (!has_running(device)) return 0;
    pthread_mutex_lock(&global);
    for (queue_t *queue = queues; queue; queue = queue->next)
        if (queue->device == device) queue->abandoned = 1;
    pthread_mutex_unlock(&global);
    while (has_running(device)) usleep(200);
    return 1;
}

/* The queue with the fewest streams, or a new one: what ROCr's runtime does. The global lock is held. */
static queue_t *share_queue(int priority) {
    queue_t *found = NULL;
    int count = 0, place = -1;
    for (int i = 0; i < MOST_QUEUES; i++) {
        if (!shared[i] && place < 0) place = i;
        if (!shared[i] || shared[i]->device != shared_device || shared[i]->priority != priority) continue;
        if (!found || shared[i]->streams < found->streams) found = shared[i];
        count++;
    }
    if (count < most_shared && place >= 0 && (found = make_queue(priority))) shared[place] = found;
    if (found) found->streams++;
    return found;
}

static int make_stream(stream_t **made, int priority, int shares) {
    stream_t *stream = calloc(1, sizeof *stream);
    stream->priority = priority;
    pthread_mutex_lock(&global);
    stream->queue = shares && most_shared ? share_queue(priority) : make_queue(priority);
    if (!stream->queue) {
        pthread_mutex_unlock(&global);
        free(stream);
        return OUT_OF_MEMORY;
    }
    for (int i = 0; i < MOST_STREAMS; i++)
        if (!streams[i]) {
            streams[i] = stream;
            break;
        }
    pthread_mutex_unlock(&global);
    *made = stream;
    return SUCCESS;
}

int hipStreamCreateWithPriority(stream_t **made, unsigned flags, int priority) {
    CHECK_REFUSAL();
    if (flags != 1 || priority < -1 || priority > 1) return INVALID_VALUE;
    return make_stream(made, priority, 1);
}

int hipExtStreamCreateWithCUMask(stream_t **made, unsigned words, const uint32_t *mask) {
    CHECK_REFUSAL();
    uint32_t all = 0;
    for (unsigned i = 0; i < words; i++) all |= mask[i];
    if (!words || words > 32 || !all) return INVALID_VALUE;
    int error = make_stream(made, 0, 0);
    if (!error) {
        memcpy((*made)->mask, mask, words * sizeof *mask);
        (*made)->mask_words = words;
    }
    return error;
}

int hipStreamDestroy(stream_t *stream) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&global);
    int found = 0;
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] == stream) {
            streams[i] = NULL;
            found = 1;
        }
    pthread_mutex_unlock(&global);
    if (!found) return INVALID_HANDLE;
    queue_t *queue = stream->queue;
    pthread_mutex_lock(&global);
    int is_own = !queue->streams;
    if (!is_own) queue->streams--; /* others may come to it: it lives as long as the process */
    pthread_mutex_unlock(&global);
    pthread_mutex_lock(&queue->lock);
    queue->stopped = is_own; /* after what it has */
    pthread_cond_signal(&queue->more);
    pthread_mutex_unlock(&queue->lock);
    return SUCCESS;
}

int hipStreamQuery(stream_t *stream) {
    CHECK_REFUSAL();
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    pthread_mutex_lock(&stream->queue->lock);
    int busy = stream->done < stream->submitted;
    pthread_mutex_unlock(&stream->queue->lock);
    return busy ? NOT_READY : SUCCESS;
}

int hipStreamSynchronize(stream_t *stream) {
    CHECK_REFUSAL();
    int error;
    for (unsigned turn = 0; (error = hipStreamQuery(stream)) == NOT_READY; turn++) pause_a_little(turn);
    return error;
}

int hipStreamGetPriority(stream_t *stream, int *priority) {
    CHECK_REFUSAL();
    *priority = stream->priority;
    return SUCCESS;
}

int hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
    CHECK_REFUSAL();
    *least = 1;
    *greatest = -1;
    return SUCCESS;
}

int hipEventCreateWithFlags(event_t **made, unsigned flags) {
    CHECK_REFUSAL();
    if (flags & ~2u) return INVALID_VALUE;
    *made = calloc(1, sizeof **made);
    pthread_mutex_init(&(*made)->lock, NULL);
    return SUCCESS;
}

int hipEventDestroy(event_t *event) { /* operations may still name it: its memory stays */
    CHECK_REFUSAL();
    return event ? SUCCESS : INVALID_HANDLE;
}

static int record(event_t *event, stream_t *stream, unsigned flags) {
    if (!stream) return NOT_SUPPORTED;
    if (stream->capture && !(flags & 1)) {
        event->capture = stream->capture;
        event->branch = position_in(stream->capture);
        return submit(stream, (operation_t){.kind = RECORD, .event = event});
    }
    event->capture = NULL;
    pthread_mutex_lock(&event->lock);
    uint64_t generation = ++event->recorded;
    pthread_mutex_unlock(&event->lock);
    return submit(stream, (operation_t){.kind = RECORD, .event = event, .generation = generation});
}

int hipEventRecordWithFlags(event_t *event, stream_t *stream, unsigned flags) {
    CHECK_REFUSAL();
    return record(event, stream, flags);
}

int hipEventRecord(event_t *event, stream_t *stream) {
    CHECK_REFUSAL();
    return record(event, stream, 0);
}

int hipStreamWaitEvent(stream_t *stream, event_t *event, unsigned flags) {
    CHECK_REFUSAL();
    if (!stream || flags) return stream ? INVALID_VALUE : NOT_SUPPORTED;
    if (event->capture) {
        graph_t *graph = event->capture;
        if (!stream->capture) { /* it joins the capture */
            stream->capture = graph;
            stream->branch = graph->branches++;
        }
        return submit(stream, (operation_t){.kind = AWAIT, .generation = event->branch});
    }
    if (stream->capture) return CAPTURE_UNSUPPORTED;
    return submit(stream, (operation_t){.kind = AWAIT, .event = event, .generation = event->recorded});
}

int hipEventQuery(event_t *event) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&event->lock);
    int reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return reached ? SUCCESS : NOT_READY;
}

int hipEventElapsedTime(float *ms, event_t *first, event_t *second) {
    CHECK_REFUSAL();
    *ms = (second->reached_us - first->reached_us) / 1e3;
    return SUCCESS;
}

/* --- captures ------------------------------------------------------------------------------------------------------ */

int hipStreamBeginCapture(stream_t *stream, int mode) {
    CHECK_REFUSAL();
    if (!stream || stream->capture || mode < 0 || mode > 2) return INVALID_VALUE;
    graph_t *graph = calloc(1, sizeof *graph);
    graph->last = &graph->first;
    graph->branches = 1;
    graph->uses = 1;
    pthread_mutex_init(&graph->lock, NULL);
    pthread_mutex_lock(&global);
    graph->number = numbers++;
    pthread_mutex_unlock(&global);
    stream->capture = graph;
    stream->branch = 0;
    return SUCCESS;
}

int hipStreamEndCapture(stream_t *stream, graph_t **made) {
    CHECK_REFUSAL();
    graph_t *graph = stream->capture;
    *made = NULL;
    if (!graph || stream->branch) return CAPTURE_INVALIDATED;
    /* The last operation of each other branch must be awaited by another one, or the fork was never joined. */
    int unjoined = 0;
    for (int branch = 1; branch < graph->branches; branch++) {
        int last = -1, position = 0, joined = 0;
        for (operation_t *op = graph->first; op; op = op->next, position++)
            if (op->branch == branch) last = position;
        for (operation_t *op = graph->first; op; op = op->next)
            joined |= op->kind == AWAIT && op->branch != branch && (int)op->generation == last;
        unjoined |= !joined;
    }
    pthread_mutex_lock(&global);
    for (int i = 0; i < MOST_STREAMS; i++)
        if (streams[i] && streams[i]->capture == graph) streams[i]->capture = NULL;
    pthread_mutex_unlock(&global);
    if (unjoined) {
        drop_graph(graph);
        return 904; /* hipErrorStreamCaptureUnjoined */
    }
    *made = graph;
    return SUCCESS;
}

int hipStreamIsCapturing(stream_t *stream, int *status) {
    CHECK_REFUSAL();
    *status = stream->capture ? 1 : 0;
    return SUCCESS;
}

int hipStreamGetCaptureInfo(stream_t *stream, int *status, uint64_t *number) {
    CHECK_REFUSAL();
    *status = stream->capture ? 1 : 0;
    *number = stream->capture ? stream->capture->number : 0;
    return SUCCESS;
}

int hipThreadExchangeStreamCaptureMode(int *mode) {
    CHECK_REFUSAL();
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}

int hipGraphInstantiate(graph_t **made, graph_t *graph, void *node, char *log, size_t bytes) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&graph->lock);
    graph->uses++;
    pthread_mutex_unlock(&graph->lock);
    *made = graph;
    return SUCCESS;
}

int hipGraphDestroy(graph_t *graph) {
    CHECK_REFUSAL();
    drop_graph(graph);
    return SUCCESS;
}

int hipGraphExecDestroy(graph_t *graph) {
    CHECK_REFUSAL();
    drop_graph(graph);
    return SUCCESS;
}

int hipGraphLaunch(graph_t *graph, stream_t *stream) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&graph->lock);
    graph->uses++;
    pthread_mutex_unlock(&graph->lock);
    return submit(stream, (operation_t){.kind = RUN_GRAPH, .graph = graph});
}

/* --- memory -------------------------------------------------------------------------------------------------------- */

static allocation_t *holding(uintptr_t address) {
    for (int i = 0; i < MOST_ALLOCATIONS; i++)
        if (allocations[i].number && address - allocations[i].start < allocations[i].bytes) return &allocations[i];
    return NULL;
}

int hipMalloc(void **address, size_t bytes) {
    CHECK_REFUSAL();
    int file = memfd_create("standin", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, bytes ? bytes : 1)) return OUT_OF_MEMORY;
    void *start = mmap(NULL, bytes ? bytes : 1, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&global);
    int error = OUT_OF_MEMORY;
    for (int i = 0; i < MOST_ALLOCATIONS && error; i++)
        if (!allocations[i].number) {
            allocations[i] = (allocation_t){(uintptr_t)start, bytes ? bytes : 1, file, numbers++};
            error = SUCCESS;
        }
    pthread_mutex_unlock(&global);
    *address = start;
    return error;
}

int hipFree(void *address) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&global);
    allocation_t *found = holding((uintptr_t)address);
    int error = found && found->start == (uintptr_t)address ? SUCCESS : INVALID_VALUE;
    if (!error) {
        munmap(address, found->bytes);
        close(found->file);
        found->number = 0;
    }
    pthread_mutex_unlock(&global);
    return error;
}

int hipPointerGetAttribute(void *value, int kind, void *address) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&global);
    allocation_t *found = holding((uintptr_t)address);
    int error = found ? SUCCESS : INVALID_VALUE;
    if (found && kind == 7) *(uint64_t *)value = found->number;
    else error = INVALID_VALUE;
    pthread_mutex_unlock(&global);
    if (error) last_error = error;
    return error;
}

int hipMemGetAddressRange(void **start, size_t *bytes, void *address) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&global);
    allocation_t *found = holding((uintptr_t)address);
    if (found) {
        *start = (void *)found->start;
        *bytes = found->bytes;
    }
    pthread_mutex_unlock(&global);
    if (!found) last_error = NOT_FOUND;
    return found ? SUCCESS : NOT_FOUND;
}

int hipIpcGetMemHandle(ipc_handle_t *handle, void *address) {
    CHECK_REFUSAL();
    pthread_mutex_lock(&global);
    allocation_t *found = holding((uintptr_t)address);
    if (found) {
        memset(handle, 0, sizeof *handle);
        snprintf(handle->reserved, sizeof *handle, "%d %d %zu", getpid(), found->file, found->bytes);
    }
    pthread_mutex_unlock(&global);
    return found ? SUCCESS : INVALID_VALUE;
}

int hipIpcOpenMemHandle(void **address, ipc_handle_t handle, unsigned flags) {
    CHECK_REFUSAL();
    int pid, file;
    size_t bytes;
    char path[64];
    if (flags != 1 || sscanf(handle.reserved, "%d %d %zu", &pid, &file, &bytes) != 3) return INVALID_VALUE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, file);
    int opened = open(path, O_RDWR | O_CLOEXEC);
    if (opened < 0) return INVALID_HANDLE;
    *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, opened, 0);
    close(opened);
    return *address == MAP_FAILED ? OUT_OF_MEMORY : SUCCESS;
}

int hipIpcCloseMemHandle(void *address) {
    CHECK_REFUSAL();
    return address ? SUCCESS : INVALID_VALUE; /* the size is not kept: the mapping ends with the process */
}

/* --- the device, and kernels, which are not made up ---------------------------------------------------------------- */

int hipSetDevice(int device) { return device ? INVALID_VALUE : SUCCESS; }
int hipDriverGetVersion(int *version) { *version = 60443484; return SUCCESS; }
int hipModuleLoadData(void **module, const void *image) { return NOT_SUPPORTED; }
int hipModuleGetFunction(void **function, void *module, const char *name) { return NOT_SUPPORTED; }
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, stream_t *stream, void **arguments, void **extra) { return NOT_SUPPORTED; }
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
    return NOT_SUPPORTED;
}

const char *hipGetErrorName(int error) {
    switch (error) {
    case SUCCESS: return "hipSuccess";
    case INVALID_VALUE: return "hipErrorInvalidValue";
    case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case INVALID_HANDLE: return "hipErrorInvalidHandle";
    case NOT_READY: return "hipErrorNotReady";
    case NOT_SUPPORTED: return "hipErrorNotSupported";
    case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    case CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
    case 904: return "hipErrorStreamCaptureUnjoined";
    default: return "hipErrorUnknown";
    }
}

__attribute__((destructor)) static void end_all(void) { is_ending = 1; }
