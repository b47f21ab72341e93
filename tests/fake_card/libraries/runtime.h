// What the files of the stand-in CUDA runtime (libcudart) share.
#pragma once
#define _GNU_SOURCE
#include "fake_card.h"
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#undef cudaGetDriverEntryPointByVersion
#undef cudaMemcpyAsync

#define OK cudaSuccess
#define MIB (1ull << 20)
#define MAX_DEVICES 16

typedef struct Event Event;
typedef struct Graph Graph;
typedef struct Stream Stream;

typedef enum { COPY, COPY_ROWS, FILL, NUMBER, HOST_FUNCTION, RECORD, WAIT, KERNEL, REPLAY } Kind;

// An entry of a stream's queue, or a node of a graph.
typedef struct Work {
  Kind kind;
  // COPY, COPY_ROWS (num_bytes of each row), FILL
  void *target;
  const void *source;
  size_t num_bytes, target_pitch, source_pitch, num_rows;
  int value;
  int owns_source;          // pageable memory was staged: freed once the work ran
  uint64_t source_checksum; // of a pinned source; 0: not watched
  int watches_target;       // a pinned target was filled with PENDING
  // RECORD, WAIT
  Event *event;
  uint64_t version;
  Stream *recorded_on; // of a WAIT
  // REPLAY, NUMBER, HOST_FUNCTION
  struct Work *nodes;
  long number;
  void (*host_function)(void *);
  void *data;
  int may_block; // until another rank has come to the same collective
  struct Work *next;
} Work;

typedef struct {
  Work *head, *tail;
} Queue;

struct Stream {
  Queue queue;
  int is_busy; // a thread runs what was its head
  Graph *capturing;
  int capture_mode;
  int is_joined; // of a stream that joined a capture: the capture's own stream waits for all it has queued
  int id, device;
};
struct Event {
  uint64_t recorded, done; // versions: how often it was recorded, and which of those has run
  Stream *stream;          // of the newest record
  Graph *captured_in;      // recorded in that capture instead
  int polls;
  struct timespec when;
};
struct Graph {
  Queue nodes;
  Stream *origin;
  int is_open; // still being captured
  int is_invalid;
  uint64_t id;
  int kernels, copies, numbers, host_functions;
};

// ---- runtime.c: settings, the log, errors
extern int num_devices;
extern size_t device_bytes;
extern int skips_big, poisons;
extern __thread int current_device;
cudaError_t refuse(cudaError_t error, const char *what);
// The error that every call returns since a kernel failed (FAKE_CARD_BREAK), or OK.
cudaError_t broken(void);

// ---- streams.c: queues and who runs them
extern pthread_mutex_t queues;
Stream *stream_of(cudaStream_t stream);
const char *mark_of(Stream *stream); // " captured" or ""
cudaError_t enqueue(Stream *stream, Work work);
void append(Queue *queue, Work *work);
void finish_stream(Stream *stream);
void finish_event(Event *event);
void finish_device(void);
// Calls `visit` for every stream, with `queues` held.
void for_each_stream(void (*visit)(Stream *, void *), void *data);

// ---- graphs.c: captures
extern __thread int thread_mode;
// Whether this thread captures, and whether the captures under way forbid the call `what`.
int is_capturing_thread(void);
int is_forbidden(const char *what);
void invalidate(Graph *graph);
void add_node(Graph *graph, Work *work);

// ---- memory.c: what kind of memory an address is
enum Memory { DEVICE_MEMORY, PINNED, PAGEABLE };
enum Memory memory_of(const void *address);
void run_copy(Work *work);
