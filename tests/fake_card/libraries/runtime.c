// Stands in for libcudart.so.13, the CUDA runtime, on a machine without a GPU: settings, counters, the log and the faults.
//
// Kept as on a card: streams are queues whose work runs as late as the host allows, or in a random order that the waits
// allow (streams.c); events; captures and what they forbid (graphs.c); the size of device memory, and which copies wait
// (memory.c); limits of a launch (kernels.c). Watched: pinned memory that is written while a copy is queued.
//
// Not kept: kernels do nothing (Python queues what computes beside them); streams never overlap; no time passes on the
// device; no faults of device code; conditional nodes of graphs.
//
// Environment, beside the order of streams.c:
// FAKE_CARD_LOG=FILE      each call in one line; %p: the process
// FAKE_CARD_DEVICES=N     so many cards
// FAKE_CARD_MIB=N         memory of each
// FAKE_CARD_POISON=0      fresh memory is zero, not 0xff
// FAKE_CARD_SKIP_BIG=1    copies above 64 KiB are left out: models whose weights are pages that nothing touches
// FAKE_CARD_ABORT=1       a fault ends the process (python -X faulthandler says where)
// FAKE_CARD_BREAK=FILE    once FILE is there a launch fails, and every call after it, as after an illegal address
#include "runtime.h"
#include <stdarg.h>
#include <unistd.h>

int num_devices = 1;
size_t device_bytes = 81559 * MIB;
int skips_big, poisons = 1;
__thread int current_device;

static __thread cudaError_t last_error = OK;
static FILE *log_file;
static int is_logging, aborts;
static const char *break_file;
static volatile int is_broken;
static long counters[NUM_COUNTERS];
static pthread_mutex_t logging = PTHREAD_MUTEX_INITIALIZER;

long card_setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text && *text ? atol(text) : otherwise;
}

__attribute__((constructor)) static void read_settings(void) {
  const char *path = getenv("FAKE_CARD_LOG");
  if (path && *path) {
    char name[4096] = "";
    const char *process = strstr(path, "%p");
    if (process)
      snprintf(name, sizeof name, "%.*s%d%s", (int)(process - path), path, getpid(), process + 2);
    log_file = fopen(process ? name : path, "w");
    is_logging = 1;
  }
  num_devices = card_setting("FAKE_CARD_DEVICES", num_devices);
  if (num_devices > MAX_DEVICES)
    num_devices = MAX_DEVICES;
  device_bytes = card_setting("FAKE_CARD_MIB", device_bytes / MIB) * MIB;
  skips_big = card_setting("FAKE_CARD_SKIP_BIG", skips_big);
  poisons = card_setting("FAKE_CARD_POISON", poisons);
  aborts = card_setting("FAKE_CARD_ABORT", 0);
  break_file = getenv("FAKE_CARD_BREAK");
}

void card_count(enum Counter counter, long add) { __atomic_fetch_add(&counters[counter], add, __ATOMIC_RELAXED); }
long card_counter(int counter) { return counters[counter]; }
void card_set_logging(int on) { is_logging = on; }

static void write_line(FILE *file, const char *head, const char *format, va_list values) {
  pthread_mutex_lock(&logging);
  fputs(head, file);
  vfprintf(file, format, values);
  fputc('\n', file);
  fflush(file);
  pthread_mutex_unlock(&logging);
}

void card_log(const char *format, ...) {
  if (!is_logging || !log_file)
    return;
  va_list values;
  va_start(values, format);
  write_line(log_file, "", format, values);
  va_end(values);
}

void card_fault(enum Counter counter, const char *format, ...) {
  card_count(counter, 1);
  for (int i = 0; i < 2; i++) {
    FILE *file = i ? log_file : stderr;
    va_list values;
    va_start(values, format);
    if (file)
      write_line(file, i ? "FAULT " : "FAKE CARD: ", format, values);
    va_end(values);
  }
  if (aborts)
    abort();
}

void card_launch(const char *name, unsigned x, unsigned y, unsigned z, void *stream, int is_triton) {
  Stream *queue = stream_of(stream);
  card_count(LAUNCHES, 1);
  if (break_file && *break_file && !access(break_file, F_OK))
    is_broken = 1;
  card_log("K %s%s (%u,%u,%u) s%d%s", is_triton ? "triton:" : "", name, x, y, z, queue->id, mark_of(queue));
  enqueue(queue, (Work){.kind = KERNEL});
}

// ---- Errors

cudaError_t refuse(cudaError_t error, const char *what) {
  last_error = error;
  card_log("ERROR %d %s", error, what);
  return error;
}
cudaError_t broken(void) { return is_broken ? refuse(cudaErrorIllegalAddress, "the device is lost") : OK; }

const char *cudaGetErrorName(cudaError_t error) {
  switch (error) {
  case cudaErrorMemoryAllocation:
    return "cudaErrorMemoryAllocation";
  case cudaErrorIllegalAddress:
    return "cudaErrorIllegalAddress";
  case cudaErrorStreamCaptureUnsupported:
    return "cudaErrorStreamCaptureUnsupported";
  case cudaErrorStreamCaptureInvalidated:
    return "cudaErrorStreamCaptureInvalidated";
  case cudaErrorStreamCaptureUnjoined:
    return "cudaErrorStreamCaptureUnjoined";
  case cudaErrorStreamCaptureIsolation:
    return "cudaErrorStreamCaptureIsolation";
  case cudaErrorInvalidConfiguration:
    return "cudaErrorInvalidConfiguration";
  default:
    return "an error of the stand-in";
  }
}
const char *cudaGetErrorString(cudaError_t error) {
  static __thread char text[64];
  switch (error) {
  case cudaErrorMemoryAllocation:
    return "out of memory";
  case cudaErrorIllegalAddress:
    return "an illegal memory access was encountered";
  case cudaErrorStreamCaptureUnsupported:
    return "operation not permitted when stream is capturing";
  case cudaErrorStreamCaptureInvalidated:
    return "operation failed due to a previous error during capture";
  case cudaErrorInvalidConfiguration:
    return "invalid configuration argument";
  default:
    snprintf(text, sizeof text, "error %d of the stand-in card", error);
    return text;
  }
}
cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = is_broken ? cudaErrorIllegalAddress : OK;
  return error;
}
cudaError_t cudaPeekAtLastError(void) { return last_error; }
