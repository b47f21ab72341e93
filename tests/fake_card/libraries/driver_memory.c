// Memory of the stand-in driver: copies, and virtual memory (address ranges, physical memory, mapping, sharing of file
// descriptors between processes), which expandable segments and symmetric memory are built on. Physical memory that may
// be shared is a memfd file; other memory comes with its mapping.
#define _GNU_SOURCE
#include "fake_card.h"
#include <cuda.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define OK CUDA_SUCCESS
#define GRAIN (2 << 20)

typedef struct {
  size_t num_bytes;
  int descriptor; // -1: not shareable
  int is_counted; // of this process's card
} Physical;

extern int cudaMemsetAsync(void *, int, size_t, void *), cudaMemGetInfo(size_t *, size_t *);
extern int cudaMemcpyAsync(void *, const void *, size_t, int, void *), cudaStreamSynchronize(void *);

CUresult cuMemcpyDtoH_v2(void *target, CUdeviceptr source, size_t num_bytes) {
  cudaMemcpyAsync(target, (void *)source, num_bytes, 2, 0);
  return cudaStreamSynchronize(0);
}
CUresult cuMemsetD32Async(CUdeviceptr target, unsigned value, size_t count, CUstream stream) {
  if (value) // only zeros are asked for
    return CUDA_ERROR_NOT_SUPPORTED;
  return cudaMemsetAsync((void *)target, 0, count * 4, stream);
}
CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return cudaMemGetInfo(free_bytes, total); }
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  *(void **)value = (void *)address;
  return OK;
}
CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *num_bytes, CUdeviceptr address) {
  return card_find_range((void *)address, (void **)start, num_bytes) ? OK : CUDA_ERROR_INVALID_VALUE;
}

// ---- Physical memory

CUresult cuMemGetAllocationGranularity(size_t *grain, const CUmemAllocationProp *properties,
                                       CUmemAllocationGranularity_flags flags) {
  *grain = GRAIN;
  return OK;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t num_bytes, const CUmemAllocationProp *properties,
                     unsigned long long flags) {
  if (!card_reserve_bytes(num_bytes))
    return CUDA_ERROR_OUT_OF_MEMORY;
  Physical *memory = malloc(sizeof *memory);
  *memory = (Physical){num_bytes, -1, 1};
  if (properties->requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    memory->descriptor = memfd_create("fake card", MFD_CLOEXEC);
    if (memory->descriptor < 0 || ftruncate(memory->descriptor, num_bytes))
      return CUDA_ERROR_OUT_OF_MEMORY;
  }
  *handle = (CUmemGenericAllocationHandle)memory;
  return OK;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  Physical *memory = (Physical *)handle;
  if (memory->descriptor >= 0)
    close(memory->descriptor);
  if (memory->is_counted)
    card_return_bytes(memory->num_bytes);
  free(memory);
  return OK;
}
CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType type, unsigned long long flags) {
  int descriptor = ((Physical *)handle)->descriptor;
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || descriptor < 0)
    return CUDA_ERROR_NOT_SUPPORTED;
  *(int *)shareable = dup(descriptor);
  return OK;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                        CUmemAllocationHandleType type) {
  struct stat status;
  int descriptor = dup((int)(intptr_t)shareable);
  if (descriptor < 0 || fstat(descriptor, &status))
    return CUDA_ERROR_INVALID_VALUE;
  Physical *memory = malloc(sizeof *memory);
  *memory = (Physical){status.st_size, descriptor, 0};
  *handle = (CUmemGenericAllocationHandle)memory;
  return OK;
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address) {
  return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *properties, CUmemGenericAllocationHandle handle) {
  memset(properties, 0, sizeof *properties);
  return OK;
}

// ---- Addresses

static void *map(void *address, size_t num_bytes, int protection, int flags, int descriptor, size_t offset) {
  int kind = descriptor < 0 ? MAP_ANONYMOUS | MAP_NORESERVE : 0;
  return mmap(address, num_bytes, protection, MAP_SHARED | kind | flags, descriptor, offset);
}
CUresult cuMemAddressReserve(CUdeviceptr *address, size_t num_bytes, size_t alignment, CUdeviceptr hint,
                             unsigned long long flags) {
  void *start = map(0, num_bytes, PROT_NONE, 0, -1, 0);
  if (start == MAP_FAILED)
    return CUDA_ERROR_OUT_OF_MEMORY;
  card_add_range(start, num_bytes);
  *address = (CUdeviceptr)start;
  return OK;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t num_bytes) { return OK; } // stays known as the device's
CUresult cuMemMap(CUdeviceptr address, size_t num_bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  int descriptor = ((Physical *)handle)->descriptor;
  void *mapped = map((void *)address, num_bytes, PROT_READ | PROT_WRITE, MAP_FIXED, descriptor, offset);
  if (mapped == MAP_FAILED)
    return CUDA_ERROR_INVALID_VALUE;
  if (descriptor < 0 && num_bytes <= 64 << 20 && card_setting("FAKE_CARD_POISON", 1))
    memset(mapped, 0xff, num_bytes);
  return OK;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t num_bytes, const CUmemAccessDesc *list, size_t count) { return OK; }
CUresult cuMemUnmap(CUdeviceptr address, size_t num_bytes) {
  return map((void *)address, num_bytes, PROT_NONE, MAP_FIXED, -1, 0) == MAP_FAILED ? CUDA_ERROR_INVALID_VALUE : OK;
}
