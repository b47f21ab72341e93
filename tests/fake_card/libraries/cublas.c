// Stands in for libcublas.so.13 where "0" does not answer enough: handles, and products as logged launches of nothing.
#include "fake_card.h"
#include <stdio.h>
#include <stdlib.h>

typedef struct {
  void *stream;
  char rest[56];
} Handle;

int cublasCreate_v2(Handle **handle) {
  *handle = calloc(1, sizeof(Handle));
  return 0;
}
int cublasSetStream_v2(Handle *handle, void *stream) {
  handle->stream = stream;
  return 0;
}
int cublasGetStream_v2(Handle *handle, void **stream) {
  *stream = handle->stream;
  return 0;
}
int cublasGetVersion_v2(void *handle, int *version) {
  *version = 130100;
  return 0;
}
int cublasGetPointerMode_v2(void *handle, int *mode) {
  *mode = 0;
  return 0;
}
int cublasGetMathMode(void *handle, int *mode) {
  *mode = 0;
  return 0;
}

static int launch(Handle *handle, const char *function, int m, int n, int k) {
  char text[96];
  snprintf(text, sizeof text, "%s m%d n%d k%d", function, m, n, k);
  card_launch(text, 1, 1, 1, handle->stream, 0);
  return 0;
}
int cublasGemmEx(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k) {
  return launch(handle, "cublasGemmEx", m, n, k);
}
int cublasGemmStridedBatchedEx(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k) {
  return launch(handle, "cublasGemmStridedBatchedEx", m, n, k);
}
int cublasSgemm_v2(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k) {
  return launch(handle, "cublasSgemm", m, n, k);
}
int cublasSgemmStridedBatched(Handle *handle, int transpose_a, int transpose_b, int m, int n, int k) {
  return launch(handle, "cublasSgemmStridedBatched", m, n, k);
}
