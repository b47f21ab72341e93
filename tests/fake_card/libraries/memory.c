// Memory of the stand-in CUDA runtime. Device memory is host memory, of which untouched pages cost nothing; copies run
// in their stream.
//
// Watched: pinned memory. The source of a queued copy is checksummed when it is queued and again when it runs; the
// target of a queued download is filled with PENDING, and must still be when the copy runs.
#include "runtime.h"
#include <sys/mman.h>

#define GRAIN (2 * MIB)         // device memory is handed out in whole grains
#define CONTEXT_BYTES (600 * MIB)
#define GUARD_BYTES 4096        // behind each allocation
#define POISONED_BYTES (64 * MIB) // larger allocations stay untouched
#define WATCHED_BYTES (1 << 20) // larger copies are not watched
#define SKIPPED_BYTES (1 << 16) // copies above it, with FAKE_CARD_SKIP_BIG
#define FRESH 0xff              // not a number in every floating type
#define PENDING 0xfe
#define MAX_RANGES (1 << 16)

typedef struct {
  char *start;
  size_t num_bytes;
  int device;
} Range;
typedef struct {
  Range ranges[MAX_RANGES];
  int count;
} Ranges;

static pthread_mutex_t bookkeeping = PTHREAD_MUTEX_INITIALIZER;
static Ranges device_ranges, pinned_ranges;
static size_t used_bytes[MAX_DEVICES];

// ---- Ranges

// The caller holds `bookkeeping`. The newest first: most questions are about them.
static Range *find(Ranges *list, const void *address) {
  for (int i = list->count - 1; i >= 0; i--)
    if ((char *)address >= list->ranges[i].start &&
        (char *)address < list->ranges[i].start + list->ranges[i].num_bytes)
      return &list->ranges[i];
  return 0;
}
static void add(Ranges *list, void *start, size_t num_bytes) {
  pthread_mutex_lock(&bookkeeping);
  if (list->count == MAX_RANGES) {
    fprintf(stderr, "FAKE CARD: more than %d allocations\n", MAX_RANGES);
    abort();
  }
  list->ranges[list->count++] = (Range){start, num_bytes, current_device};
  pthread_mutex_unlock(&bookkeeping);
}
// Returns what was there, with num_bytes 0 if nothing was.
static Range remove_range(Ranges *list, void *address) {
  Range removed = {0};
  pthread_mutex_lock(&bookkeeping);
  Range *found = find(list, address);
  if (found) {
    removed = *found;
    *found = list->ranges[--list->count];
  }
  pthread_mutex_unlock(&bookkeeping);
  return removed;
}
enum Memory memory_of(const void *address) {
  pthread_mutex_lock(&bookkeeping);
  enum Memory kind = find(&device_ranges, address) ? DEVICE_MEMORY : find(&pinned_ranges, address) ? PINNED : PAGEABLE;
  pthread_mutex_unlock(&bookkeeping);
  return kind;
}
void card_add_range(void *start, size_t num_bytes) { add(&device_ranges, start, num_bytes); }
int card_find_range(const void *address, void **start, size_t *num_bytes) {
  pthread_mutex_lock(&bookkeeping);
  Range *found = find(&device_ranges, address);
  if (found && start)
    *start = found->start;
  if (found && num_bytes)
    *num_bytes = found->num_bytes;
  pthread_mutex_unlock(&bookkeeping);
  return found != 0;
}

// ---- The size of device memory

static size_t whole_grains(size_t num_bytes) { return (num_bytes + GRAIN - 1) / GRAIN * GRAIN; }

int card_reserve_bytes(size_t num_bytes) {
  pthread_mutex_lock(&bookkeeping);
  size_t after = used_bytes[current_device] + whole_grains(num_bytes);
  int has_room = after + CONTEXT_BYTES <= device_bytes;
  if (has_room)
    used_bytes[current_device] = after;
  pthread_mutex_unlock(&bookkeeping);
  if (has_room) {
    card_count(DEVICE_ALLOCATIONS, 1);
    card_log("MALLOC %zu", num_bytes);
  }
  return has_room;
}
static void return_bytes_of(int device, size_t num_bytes) {
  pthread_mutex_lock(&bookkeeping);
  used_bytes[device] -= whole_grains(num_bytes);
  pthread_mutex_unlock(&bookkeeping);
}
void card_return_bytes(size_t num_bytes) { return_bytes_of(current_device, num_bytes); }

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = device_bytes;
  *free_bytes = device_bytes - CONTEXT_BYTES - used_bytes[current_device];
  return broken();
}

// ---- Allocation

static cudaError_t allocate(void **result, size_t num_bytes) {
  if (!card_reserve_bytes(num_bytes))
    return refuse(cudaErrorMemoryAllocation, "no memory");
  // Shared: so a limit of the data of a process (ulimit -d) counts its own memory alone.
  int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
  void *start = mmap(0, num_bytes + GUARD_BYTES, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (start == MAP_FAILED) {
    card_return_bytes(num_bytes);
    return refuse(cudaErrorMemoryAllocation, "mmap");
  }
  add(&device_ranges, start, num_bytes);
  if (poisons && num_bytes <= POISONED_BYTES)
    memset(start, FRESH, num_bytes);
  *result = start;
  return OK;
}
cudaError_t cudaMalloc(void **result, size_t num_bytes) {
  if (is_forbidden("cudaMalloc"))
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaMalloc");
  return broken() ? broken() : allocate(result, num_bytes);
}
cudaError_t cudaMallocAsync(void **result, size_t num_bytes, cudaStream_t stream) {
  return allocate(result, num_bytes);
}
cudaError_t cudaFree(void *address) {
  if (!address)
    return OK;
  if (is_forbidden("cudaFree"))
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaFree");
  finish_device(); // cudaFree waits for the device
  Range freed = remove_range(&device_ranges, address);
  if (freed.num_bytes) {
    return_bytes_of(freed.device, freed.num_bytes);
    munmap(freed.start, freed.num_bytes + GUARD_BYTES);
  }
  card_log("FREE %zu", freed.num_bytes);
  return OK;
}
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

cudaError_t cudaHostAlloc(void **result, size_t num_bytes, unsigned flags) {
  if (is_forbidden("cudaHostAlloc"))
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaHostAlloc");
  *result = aligned_alloc(4096, (num_bytes + 4095) / 4096 * 4096);
  if (!*result)
    return refuse(cudaErrorMemoryAllocation, "cudaHostAlloc");
  add(&pinned_ranges, *result, num_bytes);
  card_log("HOSTALLOC %zu", num_bytes);
  card_count(PINNED_ALLOCATIONS, 1);
  return OK;
}
cudaError_t cudaFreeHost(void *address) {
  finish_device();
  remove_range(&pinned_ranges, address);
  free(address);
  return OK;
}
cudaError_t cudaHostRegister(void *address, size_t num_bytes, unsigned flags) {
  add(&pinned_ranges, address, num_bytes);
  return OK;
}
cudaError_t cudaHostUnregister(void *address) {
  remove_range(&pinned_ranges, address);
  return OK;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
  memset(attributes, 0, sizeof *attributes);
  pthread_mutex_lock(&bookkeeping);
  Range *on_device = find(&device_ranges, address);
  if (on_device) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = on_device->device;
    attributes->devicePointer = (void *)address;
  } else if (find(&pinned_ranges, address)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = attributes->hostPointer = (void *)address;
  } else {
    attributes->type = cudaMemoryTypeUnregistered;
    attributes->hostPointer = (void *)address;
    attributes->device = -1;
  }
  pthread_mutex_unlock(&bookkeeping);
  return OK;
}

// ---- Copies

static uint64_t checksum(const void *start, size_t num_bytes) { // FNV-1a; never 0
  uint64_t hash = 1469598103934665603ull;
  for (const unsigned char *byte = start, *end = byte + num_bytes; byte < end; byte++)
    hash = (hash ^ *byte) * 1099511628211ull;
  return hash ? hash : 1;
}
static int holds_only(const unsigned char *start, size_t num_bytes, unsigned char value) {
  return !num_bytes || (start[0] == value && !memcmp(start, start + 1, num_bytes - 1));
}

void run_copy(Work *work) {
  size_t num_bytes = work->num_bytes;
  if (work->source_checksum && checksum(work->source, num_bytes) != work->source_checksum)
    card_fault(CHANGED_SOURCES, "pinned memory changed while the copy of its %zu bytes was queued", num_bytes);
  if (work->watches_target && !holds_only(work->target, num_bytes, PENDING))
    card_fault(CHANGED_TARGETS, "pinned memory was written while the copy of %zu bytes to it was queued", num_bytes);
  if (skips_big && num_bytes > SKIPPED_BYTES)
    return;
  if (work->kind == FILL)
    memset(work->target, work->value, num_bytes);
  else if (work->kind == COPY)
    memcpy(work->target, work->source, num_bytes);
  else
    for (size_t row = 0; row < work->num_rows; row++)
      memcpy((char *)work->target + row * work->target_pitch, (char *)work->source + row * work->source_pitch, num_bytes);
}

static const char *const KIND_NAMES[] = {"device", "pinned", "PAGEABLE"};

// Stages or watches the source and target of a copy that is about to be queued.
static void prepare(Work *work, Stream *stream, enum Memory from, enum Memory to) {
  if (stream->capturing)
    return;
  int is_watched = work->num_bytes <= WATCHED_BYTES && !skips_big && work->num_bytes;
  if (from == PAGEABLE) { // staged at once, as the real runtime does
    void *staged = malloc(work->num_bytes ? work->num_bytes : 1);
    memcpy(staged, work->source, work->num_bytes);
    work->source = staged;
    work->owns_source = 1;
  } else if (from == PINNED && is_watched) {
    work->source_checksum = checksum(work->source, work->num_bytes);
  }
  // A second copy to the same place before the first has run finds PENDING there, as the first will.
  if (to == PINNED && is_watched) {
    work->watches_target = !holds_only(work->target, work->num_bytes, PENDING);
    memset(work->target, PENDING, work->num_bytes);
  }
}

static cudaError_t copy(Work work, cudaStream_t handle, int is_asynchronous) {
  Stream *stream = stream_of(handle);
  enum Memory from = memory_of(work.source), to = memory_of(work.target);
  size_t total = work.num_bytes * (work.kind == COPY_ROWS ? work.num_rows : 1);
  card_log("C %s->%s %zu s%d%s%s", KIND_NAMES[from], KIND_NAMES[to], total, stream->id, mark_of(stream),
           is_asynchronous ? "" : " sync");
  card_count(COPIES, 1);
  card_count(COPIED_BYTES, total);
  if (broken())
    return broken();
  if (stream->capturing && (from == PAGEABLE || to == PAGEABLE)) {
    card_fault(FORBIDDEN, "copy of pageable memory in a capture");
    invalidate(stream->capturing);
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaMemcpyAsync");
  }
  if (work.kind == COPY)
    prepare(&work, stream, from, to);
  if (from == PAGEABLE && is_asynchronous)
    card_count(PAGEABLE_UPLOADS, 1);
  cudaError_t error = enqueue(stream, work);
  int waits = !is_asynchronous || to == PAGEABLE || (from == PAGEABLE && work.kind == COPY_ROWS);
  if (waits && !stream->capturing) {
    card_count(WAITING_COPIES, is_asynchronous);
    finish_stream(stream);
  }
  return error;
}
static Work plain_copy(void *target, const void *source, size_t num_bytes) {
  return (Work){.kind = COPY, .target = target, .source = source, .num_bytes = num_bytes};
}
cudaError_t cudaMemcpyAsync(void *target, const void *source, size_t n, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(plain_copy(target, source, n), stream, 1);
}
cudaError_t cudaMemcpy(void *target, const void *source, size_t n, enum cudaMemcpyKind kind) {
  if (is_forbidden("cudaMemcpy"))
    return refuse(cudaErrorStreamCaptureImplicit, "cudaMemcpy");
  return copy(plain_copy(target, source, n), 0, 0);
}
cudaError_t cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t n, cudaStream_t stream) {
  return copy(plain_copy(target, source, n), stream, 1);
}
cudaError_t cudaMemcpy2DAsync(void *target, size_t target_pitch, const void *source, size_t source_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  Work work = {.kind = COPY_ROWS, .target = target, .source = source, .num_bytes = width, .num_rows = height,
               .target_pitch = target_pitch, .source_pitch = source_pitch};
  return copy(work, stream, 1);
}
static Work fill(void *target, int value, size_t num_bytes) {
  return (Work){.kind = FILL, .target = target, .value = value, .num_bytes = num_bytes};
}
cudaError_t cudaMemset(void *target, int value, size_t num_bytes) {
  enqueue(stream_of(0), fill(target, value, num_bytes));
  finish_stream(stream_of(0));
  return broken();
}
cudaError_t cudaMemsetAsync(void *target, int value, size_t num_bytes, cudaStream_t stream) {
  Stream *queue = stream_of(stream);
  card_log("SET %zu s%d%s", num_bytes, queue->id, mark_of(queue));
  card_count(FILLS, 1);
  return enqueue(queue, fill(target, value, num_bytes));
}

void card_spoil(void *target, size_t num_bytes, void *stream) {
  Stream *queue = stream_of(stream);
  if (queue->capturing || !is_capturing_thread()) // torch itself allocates elsewhere as a capture begins
    enqueue(queue, fill(target, FRESH, num_bytes));
}

// ---- Accepted, and without effect

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *source, size_t n, size_t at, enum cudaMemcpyKind kind) {
  return OK;
}
cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
  static char room[65536];
  *address = room;
  return OK;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int index) {
  *pool = (cudaMemPool_t)8;
  return OK;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) {
  *(uint64_t *)value = 0;
  return OK;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value) { return OK; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count) { return OK; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t num_bytes) { return OK; }
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *address) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t handle, unsigned flags) {
  return cudaErrorNotSupported;
}
cudaError_t cudaIpcCloseMemHandle(void *address) { return cudaErrorNotSupported; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaErrorNotSupported; }
