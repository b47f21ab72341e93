// Stands in for libcuda.so.1, the driver, as far as torch and Triton's launchers call it: devices, contexts, modules and
// launches. Modules are not loaded: a function is its name. driver_memory.c has the memory, driver_refused.c what is
// refused; build.py makes the rest, which does nothing.
#include "fake_card.h"
#include <cuda.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK CUDA_SUCCESS
#define FIRST_CONTEXT 16 // a context is 16 + the number of its device

extern int cudaGetDevice(int *), cudaSetDevice(int), cudaGetDeviceCount(int *);
extern int cudaStreamIsCapturing(void *, int *), cudaStreamSynchronize(void *), cudaDeviceSynchronize(void);

// ---- Devices and contexts

CUresult cuInit(unsigned flags) { return OK; }
CUresult cuDriverGetVersion(int *version) {
  *version = 13000;
  return OK;
}
CUresult cuDeviceGet(CUdevice *device, int index) {
  *device = index;
  return OK;
}
CUresult cuDeviceGetCount(int *count) { return cudaGetDeviceCount(count); }
CUresult cuDeviceGetName(char *name, int room, CUdevice device) {
  snprintf(name, room, "NVIDIA H100 80GB HBM3 (fake)");
  return OK;
}
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = card_attribute(attribute);
  return OK;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
  *context = (CUcontext)(intptr_t)(FIRST_CONTEXT + device);
  return OK;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
  if (flags)
    *flags = 0;
  *active = 1;
  return OK;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
  int device;
  cudaGetDevice(&device);
  *context = (CUcontext)(intptr_t)(FIRST_CONTEXT + device);
  return OK;
}
CUresult cuCtxSetCurrent(CUcontext context) { return cudaSetDevice((int)(intptr_t)context - FIRST_CONTEXT); }
CUresult cuCtxGetDevice(CUdevice *device) { return cudaGetDevice(device); }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) {
  *value = 1 << 20;
  return OK;
}
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return OK; }
CUresult cuCtxSynchronize(void) { return cudaDeviceSynchronize(); }
CUresult cuGetErrorString(CUresult error, const char **text) {
  static __thread char buffer[64];
  snprintf(buffer, sizeof buffer, "driver error %d of the stand-in card", error);
  *text = buffer;
  return OK;
}
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }

// ---- Modules

CUresult cuModuleLoadData(CUmodule *module, const void *code) {
  *module = malloc(8);
  return OK;
}
CUresult cuModuleLoadDataEx(CUmodule *module, const void *code, unsigned count, CUjit_option *options, void **values) {
  return cuModuleLoadData(module, code);
}
CUresult cuModuleUnload(CUmodule module) { return OK; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return OK;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = 0;
  if (attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
    *value = 1024;
  if (attribute == CU_FUNC_ATTRIBUTE_NUM_REGS)
    *value = 128;
  return OK;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return OK; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return OK; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 66;
  return OK;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t shared) {
  *count = 2;
  return OK;
}

// ---- Launches

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **parameters,
                        void **extra) {
  const char *name = (const char *)function;
  unsigned long threads = (unsigned long)block_x * block_y * block_z;
  if (card_refuses_launch(grid_x, grid_y, grid_z, threads, shared)) {
    fprintf(stderr, "FAKE CARD: a card refuses %s (%u,%u,%u) of %lu threads and %u bytes\n", name, grid_x, grid_y,
            grid_z, threads, shared);
    return CUDA_ERROR_INVALID_VALUE;
  }
  card_launch(name, grid_x, grid_y, grid_z, stream, 1);
  return OK;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
  for (unsigned i = 0; i < config->numAttrs; i++)
    if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
        config->attrs[i].value.programmaticStreamSerializationAllowed)
      card_count(EARLY_LAUNCHES, 1);
  return cuLaunchKernel(function, config->gridDimX, config->gridDimY, config->gridDimZ, config->blockDimX,
                        config->blockDimY, config->blockDimZ, config->sharedMemBytes, config->hStream, parameters,
                        extra);
}
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                                   unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                                   CUstream stream, void **parameters) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared, stream, parameters, 0);
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  return cudaStreamIsCapturing(stream, (int *)status);
}
CUresult cuStreamSynchronize(CUstream stream) { return cudaStreamSynchronize(stream); }
