/* The kernels of each instruction set, and which of them is in use.

   Every kernel exists for float and double; bfloat16 is float inside. `void` arrays are of that type,
   or of bfloat16 where the argument is_bfloat16 (or from_..., to_...) says so. */

#ifndef EINLINEAR_TARGETS_H
#define EINLINEAR_TARGETS_H

#include <stdint.h>

enum { COPY_BLOCK = 16 };

/* What happens to a row of results before it is stored: scale, then add the bias (if not NULL). */
typedef struct {
    int is_wanted;
    double scale;
    const void *bias;
} Epilogue;

typedef struct {
    /* Run a multiply of a flat program on the tokens in the buffers. */
    void (*multiply)(const int64_t *op, long tokens, void *const *base, const int64_t *row, int add,
                     const Epilogue *epilogue, void *scratch);
    /* Copy rows into padded rows, and fill the padding with zeros. */
    void (*stage_in)(const void *from, long from_row, long width, void *to, long to_row,
                     long padded, long tokens, int is_bfloat16);
    /* Copy rows out of padded rows. */
    void (*stage_out)(const void *from, long from_row, void *to, long to_row, long width,
                      long tokens, int is_bfloat16);
    /* sums[i] (+)= the sum of column i */
    void (*add_rows)(const void *from, long row, long width, long tokens, void *sums, int add);
    /* The sum of a[i] * b[i] */
    double (*dot)(const void *a, const void *b, long count);
    /* to[i] = scale * to[i] - amount * from[i] */
    void (*adjust)(void *to, const void *from, long count, double scale, double amount);
    /* Run units first..last - 1 of a copy of a flat program, adding up `terms` arrays. */
    void (*copy)(const int64_t *op, long first, long last, const void *from, int from_bfloat16,
                 void *to, int to_bfloat16, long terms, long apart);
    /* Copy one row into a padded row, times a number. */
    void (*stage_row)(const void *from, long width, void *to, long padded, double scale,
                      int is_bfloat16);
    /* to[i] = start[i] (0 if NULL) + the sum of weights[j] * rows[j][i] */
    void (*combine)(void *to, const void *start, const void *const *rows, const double *weights,
                    long terms, long width);
    /* a = activation(h), times g unless NULL, in rows of hidden numbers, zeros after `width`. If
       slopes are wanted, h and g become the derivatives of a; if not, a may be h. */
    void (*activate)(int64_t activation, int wants_slopes, void *h, void *g, void *a, long width,
                     long row, long tokens);
    /* to[i] *= by[i] in such rows */
    void (*multiply_rows)(void *to, const void *by, long width, long row, long tokens);
} Kernels;

/* Use a target (TARGET_*), or the best one that this processor supports (-1). Returns the target in
   use, or -1 if this processor does not support the one requested. */
int choose_target(int target);

/* The kernels of the target in use. */
const Kernels *current_kernels(int is_double);

int has_neon(void);

#endif
