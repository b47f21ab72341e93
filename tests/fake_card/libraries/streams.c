// Streams and events of the stand-in CUDA runtime: queues, and the order in which their entries run.
//
// Nothing runs by itself. A thread that waits runs entries until what it waits for is done:
// FAKE_CARD_ORDER=late         no more than that: whatever is not waited for has not happened yet
// FAKE_CARD_ORDER=random:SEED  entries of any stream of the device that are ready, in a random order, and some of them
//                              whenever something is queued: a device that is sometimes ahead
// FAKE_CARD_POLLS=N            cudaEventQuery says "not ready" N times before it lets the work run
//
// Python computes the numbers, so a thread that waits for another one must not hold Python's global lock.
#include "runtime.h"
#include <dlfcn.h>

#define MAX_STREAMS 4096

static pthread_cond_t something_ran = PTHREAD_COND_INITIALIZER;
pthread_mutex_t queues = PTHREAD_MUTEX_INITIALIZER;
static Stream default_streams[MAX_DEVICES];
static Stream *streams[MAX_STREAMS];
static int num_streams;
static int is_random;
static uint64_t random_state;
static int polls_needed = 2;
static void (*number_runner)(long);

void card_set_order(const char *order) {
  is_random = order && !strncmp(order, "random:", 7);
  random_state = is_random ? strtoull(order + 7, 0, 10) * 2654435761u + 1 : 1;
}
__attribute__((constructor)) static void read_settings(void) {
  card_set_order(getenv("FAKE_CARD_ORDER"));
  polls_needed = card_setting("FAKE_CARD_POLLS", polls_needed);
  for (int i = 0; i < MAX_DEVICES; i++) {
    default_streams[i].device = i;
    default_streams[i].id = i;
    streams[num_streams++] = &default_streams[i];
  }
}

// ---- Python's global lock, where this process has one

static int (*holds_lock)(void);
static void *(*release_lock)(void);
static void (*take_lock)(void *);
static pthread_once_t found_python = PTHREAD_ONCE_INIT;

static void find_python(void) {
  holds_lock = dlsym(RTLD_DEFAULT, "PyGILState_Check");
  release_lock = dlsym(RTLD_DEFAULT, "PyEval_SaveThread");
  take_lock = dlsym(RTLD_DEFAULT, "PyEval_RestoreThread");
}
static void *without_python(void) {
  pthread_once(&found_python, find_python);
  return take_lock && holds_lock() ? release_lock() : 0;
}
static void with_python(void *state) {
  if (state)
    take_lock(state);
}

// ---- Running entries

void card_set_runner(void (*runner)(long)) { number_runner = runner; }

static void run_host_function(Work *work) {
  void *state = without_python();
  work->host_function(work->data);
  with_python(state);
}

static void run(Work *work) {
  switch (work->kind) {
  case COPY:
  case COPY_ROWS:
  case FILL:
    run_copy(work);
    break;
  case NUMBER:
    if (number_runner)
      number_runner(work->number);
    break;
  case HOST_FUNCTION:
    run_host_function(work);
    break;
  case RECORD:
    pthread_mutex_lock(&queues);
    if (work->event->done < work->version)
      work->event->done = work->version;
    clock_gettime(CLOCK_MONOTONIC, &work->event->when);
    pthread_mutex_unlock(&queues);
    break;
  case REPLAY:
    for (Work *node = work->nodes; node; node = node->next)
      run(node);
    break;
  case KERNEL:
  case WAIT: // was ready
    break;
  }
}

// xorshift64
static uint64_t roll(void) {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 7;
  random_state ^= random_state << 17;
  return random_state >> 11;
}

static int awaits(Work *work) { return work->kind == WAIT && work->event->done < work->version; }
static int is_ready(Stream *stream) {
  Work *head = stream->queue.head;
  return !stream->is_busy && head && !awaits(head);
}

// The stream whose head has to run before `stream` gets on; 0: another thread runs it. Under `queues`.
static Stream *needed(Stream *stream) {
  while (!stream->is_busy && stream->queue.head && awaits(stream->queue.head))
    stream = stream->queue.head->recorded_on;
  return is_ready(stream) ? stream : 0;
}
// Any stream of the device whose head is ready and cannot block; 0: none. Under `queues`.
static Stream *any_ready(int device) {
  Stream *chosen = 0;
  int found = 0;
  for (int i = 0; i < num_streams; i++) {
    Stream *stream = streams[i];
    if (stream->device == device && is_ready(stream) && !stream->queue.head->may_block && roll() % ++found == 0)
      chosen = stream;
  }
  return chosen;
}

// Under `queues`, which is released meanwhile.
static void run_head(Stream *stream) {
  Work *work = stream->queue.head;
  stream->queue.head = work->next;
  if (!work->next)
    stream->queue.tail = 0;
  stream->is_busy = 1;
  pthread_mutex_unlock(&queues);
  run(work);
  if (work->owns_source)
    free((void *)work->source);
  free(work);
  pthread_mutex_lock(&queues);
  stream->is_busy = 0;
  pthread_cond_broadcast(&something_ran);
}

static void wait_for_another_thread(void) {
  void *state = without_python();
  pthread_cond_wait(&something_ran, &queues);
  if (!state)
    return;
  pthread_mutex_unlock(&queues); // the thread that has Python's lock may want this one
  with_python(state);
  pthread_mutex_lock(&queues);
}

// Until the event is at that version, or without one until the stream is empty.
static void run_until(Stream *stream, Event *event, uint64_t version) {
  pthread_mutex_lock(&queues);
  while (event ? event->done < version : stream->is_busy || stream->queue.head) {
    Stream *next = is_random && roll() % 4 ? any_ready(stream->device) : 0;
    if (!next)
      next = needed(stream);
    if (next)
      run_head(next);
    else
      wait_for_another_thread();
  }
  pthread_mutex_unlock(&queues);
}

void finish_stream(Stream *stream) { run_until(stream, 0, 0); }
void finish_event(Event *event) { run_until(event->stream, event, event->recorded); }
void finish_device(void) {
  for (int i = 0; i < num_streams; i++)
    if (streams[i]->device == current_device)
      finish_stream(streams[i]);
}

// What a device that is ahead does while the host queues more.
static void run_some(int device) {
  if (!is_random)
    return;
  pthread_mutex_lock(&queues);
  while (roll() % 2) {
    Stream *next = any_ready(device);
    if (!next)
      break;
    run_head(next);
  }
  pthread_mutex_unlock(&queues);
}

// ---- Queueing

Stream *stream_of(cudaStream_t stream) {
  int is_default = stream == 0 || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
  return is_default ? &default_streams[current_device] : (Stream *)stream;
}
const char *mark_of(Stream *stream) { return stream->capturing ? " captured" : ""; }
void for_each_stream(void (*visit)(Stream *, void *), void *data) {
  pthread_mutex_lock(&queues);
  for (int i = 0; i < num_streams; i++)
    visit(streams[i], data);
  pthread_mutex_unlock(&queues);
}

void append(Queue *queue, Work *work) {
  work->next = 0;
  if (queue->tail)
    queue->tail->next = work;
  else
    queue->head = work;
  queue->tail = work;
}

cudaError_t enqueue(Stream *stream, Work description) {
  Work *work = malloc(sizeof *work);
  *work = description;
  int runs_on_device = work->kind == KERNEL || work->kind == COPY || work->kind == COPY_ROWS || work->kind == FILL;
  pthread_mutex_lock(&queues);
  if (stream->capturing) {
    stream->is_joined = 0;
    add_node(stream->capturing, work);
    pthread_mutex_unlock(&queues);
    return OK;
  }
  append(&stream->queue, work);
  pthread_mutex_unlock(&queues);
  if (runs_on_device && is_capturing_thread())
    card_fault(OUTSIDE_CAPTURE, "work on stream %d by a thread that captures another", stream->id);
  if (runs_on_device || work->kind == NUMBER)
    run_some(stream->device);
  return OK;
}

int card_queue_number(void *stream, long number) {
  card_count(COMPUTED, 1);
  return enqueue(stream_of(stream), (Work){.kind = NUMBER, .number = number});
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
  Work work = {.kind = HOST_FUNCTION, .host_function = function, .data = data, .may_block = 1};
  return enqueue(stream_of(stream), work);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void *data, unsigned flags) {
  return cudaErrorNotSupported;
}

// ---- Streams

static cudaError_t new_stream(cudaStream_t *stream) {
  Stream *made = calloc(1, sizeof *made);
  made->device = current_device;
  pthread_mutex_lock(&queues);
  if (num_streams == MAX_STREAMS) {
    fprintf(stderr, "FAKE CARD: more than %d streams\n", MAX_STREAMS);
    abort();
  }
  made->id = num_streams;
  streams[num_streams++] = made;
  pthread_mutex_unlock(&queues);
  *stream = (cudaStream_t)made;
  return OK;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return new_stream(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
  return new_stream(stream);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return OK; } // queued work may still name it
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
  *priority = 0;
  return OK;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Stream *queue = stream_of(stream);
  if (broken())
    return broken();
  if (queue->capturing) {
    invalidate(queue->capturing);
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamQuery");
  }
  pthread_mutex_lock(&queues);
  int is_idle = !queue->queue.head && !queue->is_busy;
  pthread_mutex_unlock(&queues);
  if (is_idle)
    return OK;
  finish_stream(queue);
  return cudaErrorNotReady;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Stream *queue = stream_of(stream);
  card_log("SYNC stream %d", queue->id);
  card_count(STREAM_WAITS, 1);
  if (queue->capturing) {
    invalidate(queue->capturing);
    card_fault(FORBIDDEN, "wait for a stream that captures");
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  }
  if (is_forbidden("cudaStreamSynchronize"))
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaStreamSynchronize");
  if (!broken())
    finish_stream(queue);
  return broken();
}
cudaError_t cudaDeviceSynchronize(void) {
  card_log("SYNC device");
  card_count(STREAM_WAITS, 1);
  if (is_forbidden("cudaDeviceSynchronize"))
    return refuse(cudaErrorStreamCaptureUnsupported, "cudaDeviceSynchronize");
  if (!broken())
    finish_device();
  return broken();
}

// ---- Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
  *event = (cudaEvent_t)calloc(1, sizeof(Event));
  return OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return OK; } // queued work may still name it
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags) {
  Event *event = (Event *)handle;
  Stream *queue = stream_of(stream);
  event->polls = 0;
  event->stream = queue;
  event->captured_in = queue->capturing;
  if (queue->capturing)
    return OK;
  event->recorded++;
  card_log("EVENT record s%d", queue->id);
  return enqueue(queue, (Work){.kind = RECORD, .event = event, .version = event->recorded});
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Event *event = (Event *)handle;
  if (event->captured_in || is_forbidden("cudaEventQuery"))
    return refuse(cudaErrorCapturedEvent, "cudaEventQuery");
  if (broken())
    return broken();
  if (event->done >= event->recorded)
    return OK;
  if (++event->polls <= (is_random ? (int)(roll() % (polls_needed + 2)) : polls_needed))
    return cudaErrorNotReady;
  finish_event(event);
  return OK;
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  Event *event = (Event *)handle;
  card_log("SYNC event");
  card_count(EVENT_WAITS, 1);
  if (event->captured_in || is_forbidden("cudaEventSynchronize"))
    return refuse(cudaErrorCapturedEvent, "cudaEventSynchronize");
  if (!broken() && event->done < event->recorded)
    finish_event(event);
  return broken();
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
  struct timespec *start = &((Event *)from)->when, *end = &((Event *)to)->when;
  *milliseconds = (end->tv_sec - start->tv_sec) * 1e3 + (end->tv_nsec - start->tv_nsec) * 1e-6 + 1e-3;
  return OK;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned flags) {
  Event *event = (Event *)handle;
  Stream *queue = stream_of(stream);
  if (event->captured_in) {
    if (!event->captured_in->is_open)
      return refuse(cudaErrorCapturedEvent, "cudaStreamWaitEvent");
    if (queue->capturing)
      event->stream->is_joined = 1;
    queue->capturing = event->captured_in;
    return OK;
  }
  if (event->recorded == 0)
    return OK;
  if (queue->capturing) {
    invalidate(queue->capturing);
    card_fault(FORBIDDEN, "a capture waits for an event that was recorded outside of it");
    return refuse(cudaErrorStreamCaptureIsolation, "cudaStreamWaitEvent");
  }
  Work work = {.kind = WAIT, .event = event, .version = event->recorded, .recorded_on = event->stream};
  return enqueue(queue, work);
}
