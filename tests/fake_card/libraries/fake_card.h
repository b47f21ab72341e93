// What the other stand-in libraries and Python ask of the stand-in CUDA runtime.
#pragma once
#include <stddef.h>

// The counters of a process; python/fake_card/counters.py has the same order.
enum Counter {
  LAUNCHES,           // kernels, and calls of libraries that stand for one
  COMPUTED,           // launches and operators whose numbers Python computes
  EARLY_LAUNCHES,     // kernels that may take their places beside the one before (programmatic dependent launch)
  GRAPH_LAUNCHES,     // replays
  COPIES,             // of memory, in either direction or on the device
  COPIED_BYTES,       // by them
  FILLS,              // memset
  DEVICE_ALLOCATIONS, // cudaMalloc and cuMemCreate
  PINNED_ALLOCATIONS, // cudaHostAlloc
  PAGEABLE_UPLOADS,   // asynchronous copies from memory that is not pinned
  WAITING_COPIES,     // asynchronous copies that waited for the device after all
  STREAM_WAITS,       // of the host, for a stream or the device
  EVENT_WAITS,        // of the host, for an event
  FORBIDDEN,          // fault: a call that a capture forbids
  OUTSIDE_CAPTURE,    // fault: work queued on another stream by a thread that captures
  CHANGED_SOURCES,    // fault: pinned memory that changed before the copy from it ran
  CHANGED_TARGETS,    // fault: pinned memory that changed before the copy to it ran
  PARTED_RANKS,       // fault: ranks in different collectives, or one that no other comes to
  NUM_COUNTERS
};

// Counts, and writes one line to the log if there is one.
void card_count(enum Counter counter, long add);
void card_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
// The same for a fault, which is also written to stderr behind "FAKE CARD: ".
void card_fault(enum Counter counter, const char *format, ...) __attribute__((format(printf, 2, 3)));

// A launch of `name` on `stream`, counted and logged. The kernel itself does nothing.
void card_launch(const char *name, unsigned x, unsigned y, unsigned z, void *stream, int is_triton);
// Whether an H100 would refuse such a launch.
int card_refuses_launch(unsigned x, unsigned y, unsigned z, unsigned long threads, size_t shared_bytes);
int card_attribute(int attribute);

// Device memory that the driver's interface maps by itself.
int card_reserve_bytes(size_t num_bytes); // 0: there is not so much
void card_return_bytes(size_t num_bytes);
void card_add_range(void *start, size_t num_bytes);
int card_find_range(const void *address, void **start, size_t *num_bytes);

// An integer of the environment, or `otherwise`.
long card_setting(const char *name, long otherwise);

// For Python: what runs a queued number, and the queueing of one on a stream (in a capture: for each replay).
void card_set_runner(void (*runner)(long));
int card_queue_number(void *stream, long number);
// Fills fresh memory with rubbish, in its stream.
void card_spoil(void *target, size_t num_bytes, void *stream);
void card_set_logging(int on);
void card_set_order(const char *order); // as FAKE_CARD_ORDER
long card_counter(int counter);
