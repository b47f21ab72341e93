// The devices of the stand-in CUDA runtime: each an H100 of 80 GB, with as many multiprocessors as FAKE_CARD_PROCESSORS
// says: many kernels have a grid for each, and the interpreter takes them one by one.
#include "runtime.h"

#define NUM_PROCESSORS (card_setting("FAKE_CARD_PROCESSORS", 132))
#define SHARED_BYTES_OF_BLOCK 232448

int card_attribute(int attribute) {
  switch (attribute) {
  case cudaDevAttrMaxThreadsPerBlock:
  case cudaDevAttrMaxBlockDimX:
  case cudaDevAttrMaxBlockDimY:
  case cudaDevAttrReservedSharedMemoryPerBlock:
    return 1024;
  case cudaDevAttrMaxBlockDimZ:
    return 64;
  case cudaDevAttrMaxGridDimX:
    return 2147483647;
  case cudaDevAttrMaxGridDimY:
  case cudaDevAttrMaxGridDimZ:
    return 65535;
  case cudaDevAttrMaxSharedMemoryPerBlock:
    return 49152;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin:
    return SHARED_BYTES_OF_BLOCK;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
    return SHARED_BYTES_OF_BLOCK + 1024;
  case cudaDevAttrWarpSize:
  case cudaDevAttrMaxBlocksPerMultiprocessor:
    return 32;
  case cudaDevAttrMaxRegistersPerBlock:
  case cudaDevAttrMaxRegistersPerMultiprocessor:
    return 65536;
  case cudaDevAttrMultiProcessorCount:
    return NUM_PROCESSORS;
  case cudaDevAttrMaxThreadsPerMultiProcessor:
    return 2048;
  case cudaDevAttrComputeCapabilityMajor:
    return 9;
  case cudaDevAttrL2CacheSize:
    return 50 << 20;
  case cudaDevAttrClockRate:
    return 1980000;
  case cudaDevAttrMemoryClockRate:
    return 2619000;
  case cudaDevAttrGlobalMemoryBusWidth:
    return 5120;
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrConcurrentKernels:
  case cudaDevAttrCooperativeLaunch:
  case cudaDevAttrMemoryPoolsSupported:
  case 102: // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    return 1;
  default:
    return 0;
  }
}

int card_refuses_launch(unsigned x, unsigned y, unsigned z, unsigned long threads, size_t shared_bytes) {
  int bad_grid = !x || !y || !z || y > 65535 || z > 65535;
  return bad_grid || threads > 1024 || shared_bytes > SHARED_BYTES_OF_BLOCK;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int index) {
  memset(properties, 0, sizeof *properties);
  strcpy(properties->name, "NVIDIA H100 80GB HBM3 (fake)");
  properties->totalGlobalMem = device_bytes;
  properties->major = card_attribute(cudaDevAttrComputeCapabilityMajor);
  properties->minor = card_attribute(cudaDevAttrComputeCapabilityMinor);
  properties->multiProcessorCount = NUM_PROCESSORS;
  properties->sharedMemPerBlock = card_attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  properties->sharedMemPerBlockOptin = SHARED_BYTES_OF_BLOCK;
  properties->sharedMemPerMultiprocessor = card_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = card_attribute(cudaDevAttrMaxThreadsPerMultiProcessor);
  properties->maxBlocksPerMultiProcessor = 32;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->l2CacheSize = card_attribute(cudaDevAttrL2CacheSize);
  properties->totalConstMem = 65536;
  properties->textureAlignment = 512;
  properties->memoryBusWidth = card_attribute(cudaDevAttrGlobalMemoryBusWidth);
  properties->unifiedAddressing = properties->concurrentKernels = properties->cooperativeLaunch = 1;
  properties->pciBusID = index + 1;
  return OK;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int index) {
  *value = card_attribute(attribute);
  return OK;
}

cudaError_t cudaGetDeviceCount(int *count) {
  *count = num_devices;
  return OK;
}
cudaError_t cudaGetDevice(int *index) {
  *index = current_device;
  return OK;
}
cudaError_t cudaSetDevice(int index) {
  if (index < 0 || index >= num_devices)
    return refuse(cudaErrorInvalidDevice, "cudaSetDevice");
  current_device = index;
  return OK;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) {
  *can = one != other;
  return OK;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int index) {
  snprintf(text, room, "0000:%02x:00.0", index + 1);
  return OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -5;
  return OK;
}
cudaError_t cudaDriverGetVersion(int *version) {
  *version = 13000;
  return OK;
}
cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }
cudaError_t cudaProfilerStart(void) { return OK; }
cudaError_t cudaProfilerStop(void) { return OK; }
