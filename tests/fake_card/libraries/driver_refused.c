// What torch looks up in libcuda.so.1 at run time and the stand-in refuses, as a card without it does: multicast, green
// contexts, linking of device code, memory operations of streams. In a file of its own, since these have no parameters
// here and cuda.h declares them with some.
#include <stdio.h>

#define REFUSED(function)                                                                                              \
  int function() {                                                                                                     \
    fprintf(stderr, "FAKE CARD refuses " #function "\n");                                                              \
    return 801; /* CUDA_ERROR_NOT_SUPPORTED */                                                                         \
  }
REFUSED(cuMulticastAddDevice)
REFUSED(cuMulticastBindMem)
REFUSED(cuMulticastCreate)
REFUSED(cuMulticastUnbind)
REFUSED(cuStreamWriteValue32)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleLoad)
REFUSED(cuGreenCtxCreate)
REFUSED(cuGreenCtxDestroy)
REFUSED(cuGreenCtxStreamCreate)
REFUSED(cuCtxFromGreenCtx)
REFUSED(cuCtxPopCurrent)
REFUSED(cuCtxPushCurrent)
REFUSED(cuDevResourceGenerateDesc)
REFUSED(cuDevSmResourceSplitByCount)
REFUSED(cuDeviceGetDevResource)

// Descriptors of tensor maps are accepted: no kernel reads them.
int cuTensorMapEncodeTiled() { return 0; }
