/* One arena per calling thread. Fresh memory costs page faults, so an arena is freed only when its
   thread ends or the caller asks for it. */

#define _GNU_SOURCE
#include "arena.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    char *start;
    size_t size;
} Arena;

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>

char *unpoisoned(char *start, size_t size) {
    __asan_unpoison_memory_region(start, size);
    return start;
}

/* Fill with NaN as well, so that a read before the first write shows up in the results. */
static void poison(const Arena *arena) {
    memset(unpoisoned(arena->start, arena->size), 0xff, arena->size);
    __asan_poison_memory_region(arena->start, arena->size);
}
#else
#define poison(arena) ((void)0)
#endif

static pthread_key_t arena_key;
static pthread_once_t arena_once = PTHREAD_ONCE_INIT;

static void free_arena(void *arena) {
    free(((Arena *)arena)->start);
    free(arena);
}

static void make_key(void) { pthread_key_create(&arena_key, free_arena); }

/* The calling thread's arena, or NULL if it has none yet. */
static Arena *find_arena(void) {
    pthread_once(&arena_once, make_key);
    return pthread_getspecific(arena_key);
}

char *reserve_arena(size_t size) {
    Arena *arena = find_arena();
    if (!arena) {
        arena = calloc(1, sizeof *arena);
        if (!arena || pthread_setspecific(arena_key, arena)) {
            free(arena);
            return 0;
        }
    }
    if (size > arena->size) {
        void *start = 0;
        size += size / 4;
        release_arena();
        if (posix_memalign(&start, PAGE, size)) return 0;
        arena->start = start, arena->size = size;
    }
    poison(arena);
    return arena->start;
}

size_t arena_size(void) {
    const Arena *arena = find_arena();
    return arena ? arena->size : 0;
}

void release_arena(void) {
    Arena *arena = find_arena();
    if (!arena) return;
    free(arena->start);
    arena->start = 0, arena->size = 0;
}
