// Stands in for libcudnn.so.9 as far as torch asks for its version. It computes nothing: cuDNN's attention must stay off.
#include <stdlib.h>

int cudnnCreate(void **handle) {
  *handle = calloc(1, 64);
  return 0;
}
unsigned long cudnnGetVersion(void) { return 91900; }
unsigned long cudnnGetCudartVersion(void) { return 13000; }
