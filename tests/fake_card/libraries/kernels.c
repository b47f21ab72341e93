// Kernels of torch's own libraries: registered by their static constructors, known by name, launched as nothing. A launch
// that an H100 would refuse is refused.
#include "runtime.h"
#include <dlfcn.h>

typedef struct {
  const void *host;
  const char *name;
} Function;
typedef struct {
  dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} Configuration;

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static Function *functions;
static size_t num_functions, room;
static int is_sorted;
static __thread Configuration configurations[16];
static __thread int num_configurations;

// ---- Names

static int by_address(const void *one, const void *other) {
  const void *x = ((Function *)one)->host, *y = ((Function *)other)->host;
  return x < y ? -1 : x > y;
}
static const char *name_of(const void *host) {
  pthread_mutex_lock(&registry);
  if (!is_sorted) {
    qsort(functions, num_functions, sizeof *functions, by_address);
    is_sorted = 1;
  }
  Function key = {host, 0};
  Function *found = bsearch(&key, functions, num_functions, sizeof key, by_address);
  pthread_mutex_unlock(&registry);
  return found ? found->name : "unknown";
}
void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 0; }
void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int external, size_t size,
                       int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device_function, const char *name, int limit,
                            void *thread_id, void *block_id, void *block, void *grid, int *warp_size) {
  pthread_mutex_lock(&registry);
  if (num_functions == room) {
    room = room ? room * 2 : 65536;
    functions = realloc(functions, room * sizeof *functions);
  }
  functions[num_functions++] = (Function){host, name};
  is_sorted = 0;
  pthread_mutex_unlock(&registry);
}

// ---- Launches

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, struct CUstream_st *stream) {
  configurations[num_configurations++] = (Configuration){grid, block, shared_bytes, stream};
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream) {
  Configuration last = configurations[--num_configurations];
  *grid = last.grid;
  *block = last.block;
  *shared_bytes = last.shared_bytes;
  *(void **)stream = last.stream;
  return OK;
}
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = (cudaKernel_t)host;
  return OK;
}
static cudaError_t launch(const void *function, dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream) {
  if (broken())
    return broken();
  if (card_refuses_launch(grid.x, grid.y, grid.z, (unsigned long)block.x * block.y * block.z, shared_bytes))
    return refuse(cudaErrorInvalidConfiguration, name_of(function));
  card_launch(name_of(function), grid.x, grid.y, grid.z, stream, 0);
  return OK;
}
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                             cudaStream_t stream) {
  return launch(function, grid, block, shared_bytes, stream);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared_bytes,
                               cudaStream_t stream) {
  return launch(kernel, grid, block, shared_bytes, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments,
                                        size_t shared_bytes, cudaStream_t stream) {
  return launch(function, grid, block, shared_bytes, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
  return launch(function, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}

// ---- What a kernel needs

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 64;
  attributes->binaryVersion = attributes->ptxVersion = 90;
  attributes->maxDynamicSharedSizeBytes = card_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return OK;
}
cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return OK; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                            int index) {
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads,
                                                          size_t shared_bytes) {
  *blocks = 2;
  return OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads,
                                                                   size_t shared_bytes, unsigned flags) {
  *blocks = 2;
  return OK;
}
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned count, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned library_count) {
  *library = malloc(8);
  return OK;
}
cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name) {
  *kernel = (cudaKernel_t)strdup(name);
  return OK;
}
cudaError_t cudaLibraryUnload(cudaLibrary_t library) { return OK; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  static void *driver;
  if (!driver)
    driver = dlopen("libcuda.so.1", RTLD_NOW);
  char second_version[128];
  snprintf(second_version, sizeof second_version, "%s_v2", name);
  *function = driver ? dlsym(driver, name) : 0;
  if (!*function && driver)
    *function = dlsym(driver, second_version);
  if (result)
    *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  if (!*function)
    card_log("NO DRIVER FUNCTION %s", name);
  return *function ? OK : cudaErrorSymbolNotFound;
}
