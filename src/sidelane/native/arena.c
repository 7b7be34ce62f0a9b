/* Memory that torch's allocator takes in place of cudaMalloc: pieces of a region that exists already (see
   session/pool_cuda.py). Nothing here touches the device.

   torch calls in the middle of its own work, with its locks held, so that this must not be Python: who waited for the
   GIL here could wait for a thread that has it and waits for one of those locks. Its functions get no word about whose
   they are, so that there is a pair of them for each arena that a process may have at once.

   A piece that comes back may still be in use by what its stream has queued. It is given out again on that stream only;
   memory that was never given out goes to any. Which piece is taken depends on the order of the calls alone, so that
   ranks that allocate alike have the same offsets. */

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#define ARENAS 16
#define ALIGNMENT 512

typedef struct {
    size_t offset, nbytes;
    void *stream; /* that has used it, if `known` */
    int known, used;
} Piece;

typedef struct {
    char *base; /* NULL: there is no such arena */
    size_t nbytes, used, refused;
    int device;
    Piece *pieces; /* all of the region, in order */
    size_t count, room;
} Arena;

static Arena arenas[ARENAS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* A slot for a region; -1 if all are taken, or there is no memory for its table. */
int sidelane_arena_open(void *base, size_t nbytes, int device) {
    int found = -1;
    pthread_mutex_lock(&lock);
    for (int slot = 0; slot < ARENAS && found < 0; slot++) {
        Arena *arena = &arenas[slot];
        if (arena->base)
            continue;
        Piece *pieces = calloc(64, sizeof(Piece));
        if (!pieces)
            break;
        memset(arena, 0, sizeof(Arena));
        arena->base = base, arena->nbytes = nbytes, arena->device = device;
        arena->pieces = pieces, arena->room = 64, arena->count = 1;
        pieces[0].nbytes = nbytes;
        found = slot;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* Give up a slot, if nothing of it is taken: 1 if so. */
int sidelane_arena_close(int slot) {
    Arena *arena = &arenas[slot];
    pthread_mutex_lock(&lock);
    int empty = arena->base && !arena->used;
    if (empty) {
        free(arena->pieces);
        memset(arena, 0, sizeof(Arena));
    }
    pthread_mutex_unlock(&lock);
    return empty;
}

size_t sidelane_arena_used(int slot) {
    pthread_mutex_lock(&lock);
    size_t used = arenas[slot].used;
    pthread_mutex_unlock(&lock);
    return used;
}

/* The size that did not fit last; 0 if all did since this was last asked. */
size_t sidelane_arena_refused(int slot) {
    pthread_mutex_lock(&lock);
    size_t refused = arenas[slot].refused;
    arenas[slot].refused = 0;
    pthread_mutex_unlock(&lock);
    return refused;
}

static int split(Arena *arena, size_t at, size_t nbytes) {
    if (arena->pieces[at].nbytes == nbytes)
        return 1;
    if (arena->count == arena->room) {
        Piece *larger = realloc(arena->pieces, 2 * arena->room * sizeof(Piece));
        if (!larger)
            return 0;
        arena->pieces = larger, arena->room *= 2;
    }
    Piece *piece = &arena->pieces[at];
    memmove(piece + 1, piece, (arena->count - at) * sizeof(Piece));
    arena->count++;
    piece[1].offset += nbytes, piece[1].nbytes -= nbytes;
    piece->nbytes = nbytes;
    return 1;
}

static void *take(Arena *arena, size_t nbytes, int device, void *stream) {
    void *found = NULL;
    size_t wanted = (nbytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT, best = SIZE_MAX;
    pthread_mutex_lock(&lock);
    if (arena->base && device == arena->device && wanted)
        for (size_t at = 0; at < arena->count; at++) {
            Piece *piece = &arena->pieces[at];
            if (piece->used || piece->nbytes < wanted || (piece->known && piece->stream != stream))
                continue;
            if (best == SIZE_MAX || piece->nbytes < arena->pieces[best].nbytes)
                best = at;
        }
    if (best != SIZE_MAX && split(arena, best, wanted)) {
        Piece *piece = &arena->pieces[best];
        piece->used = piece->known = 1, piece->stream = stream;
        arena->used += piece->nbytes;
        found = arena->base + piece->offset;
    } else
        arena->refused = nbytes;
    pthread_mutex_unlock(&lock);
    return found;
}

static int joins(const Piece *one, const Piece *next) {
    return !one->used && !next->used && one->known == next->known && one->stream == next->stream;
}

static void join(Arena *arena, size_t at) {
    Piece *piece = &arena->pieces[at];
    if (at + 1 >= arena->count || !joins(piece, piece + 1))
        return;
    piece->nbytes += piece[1].nbytes;
    memmove(piece + 1, piece + 2, (arena->count - at - 2) * sizeof(Piece));
    arena->count--;
}

static void put_back(Arena *arena, void *address) {
    pthread_mutex_lock(&lock);
    for (size_t at = 0; arena->base && at < arena->count; at++) {
        Piece *piece = &arena->pieces[at];
        if (!piece->used || arena->base + piece->offset != (char *)address)
            continue;
        piece->used = 0;
        arena->used -= piece->nbytes;
        join(arena, at);
        if (at)
            join(arena, at - 1);
        break;
    }
    pthread_mutex_unlock(&lock);
}

#define PAIR(slot)                                                                          \
    void *sidelane_arena_malloc_##slot(ssize_t nbytes, int device, void *stream) {          \
        return take(&arenas[slot], nbytes > 0 ? (size_t)nbytes : 0, device, stream);        \
    }                                                                                       \
    void sidelane_arena_free_##slot(void *address, ssize_t nbytes, int device, void *stream) { \
        (void)nbytes, (void)device, (void)stream;                                           \
        put_back(&arenas[slot], address);                                                   \
    }

PAIR(0) PAIR(1) PAIR(2) PAIR(3) PAIR(4) PAIR(5) PAIR(6) PAIR(7)
PAIR(8) PAIR(9) PAIR(10) PAIR(11) PAIR(12) PAIR(13) PAIR(14) PAIR(15)
