/* Workspaces: one arena per calling thread, which grows and is kept between calls. */

#ifndef EINLINEAR_ARENA_H
#define EINLINEAR_ARENA_H

#include <stddef.h>

enum { PAGE = 4096 };

/* At least `size` bytes, aligned to a page, valid until the next call from this thread; or NULL. */
char *reserve_arena(size_t size);

/* The size of the calling thread's arena. */
size_t arena_size(void);

/* Free the calling thread's arena. */
void release_arena(void);

/* With AddressSanitizer, an arena is poisoned until its buffers are handed out one by one, so that a
   read between two buffers is reported. */
#ifdef __SANITIZE_ADDRESS__
char *unpoisoned(char *start, size_t size);
#else
#define unpoisoned(start, size) (start)
#endif

#endif
