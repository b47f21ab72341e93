// Stands in for libcublasLt.so.13 where "0" does not answer enough: descriptors, a heuristic that finds one algorithm, and
// the product as a logged launch of nothing.
#include "fake_card.h"
#include <stdlib.h>
#include <string.h>

static int create(void **handle) {
  *handle = calloc(1, 64);
  return 0;
}
int cublasLtCreate(void **handle) { return create(handle); }
int cublasLtMatmulDescCreate(void **description, int compute_type, int scale_type) { return create(description); }
int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long stride) {
  return create(layout);
}
int cublasLtMatmulPreferenceCreate(void **preference) { return create(preference); }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *description, void *a, void *b, void *c, void *d,
                                   void *preference, int wanted, void *results, int *found) {
  memset(results, 0, 96); // one cublasLtMatmulHeuristicResult_t
  *found = 1;
  return 0;
}
int cublasLtMatmul(void *handle, void *description, void *alpha, void *a, void *layout_a, void *b, void *layout_b,
                   void *beta, void *c, void *layout_c, void *d, void *layout_d, void *algorithm, void *workspace,
                   unsigned long workspace_bytes, void *stream) {
  card_launch("cublasLtMatmul", 1, 1, 1, stream, 0);
  return 0;
}
