// Captures and graphs of the stand-in CUDA runtime: what is queued on a capturing stream becomes a node, and a replay is
// one entry of a queue that runs all nodes in the order in which they were captured.
//
// As on a card: global, thread-local and relaxed captures and what each forbids; streams that join by an event and have
// to be joined back; a capture that a forbidden call made invalid.
#include "runtime.h"

typedef struct {
  Queue nodes;
  int kernels, copies, numbers, host_functions;
} Executable;

__thread int thread_mode = cudaStreamCaptureModeGlobal;
static __thread int thread_captures;
static __thread int thread_capture_mode;
static __thread Stream *thread_capture_stream;
static uint64_t next_id = 1;

int is_capturing_thread(void) { return thread_captures > 0; }

void invalidate(Graph *graph) { graph->is_invalid = 1; }

void add_node(Graph *graph, Work *work) {
  append(&graph->nodes, work);
  graph->kernels += work->kind == KERNEL;
  graph->numbers += work->kind == NUMBER;
  graph->host_functions += work->kind == HOST_FUNCTION;
  graph->copies += work->kind == COPY || work->kind == COPY_ROWS || work->kind == FILL;
}

static void see_global_capture(Stream *stream, void *found) {
  if (stream->capturing && stream->capture_mode == cudaStreamCaptureModeGlobal)
    *(int *)found = 1;
}

int is_forbidden(const char *what) {
  int is_strict = thread_mode != cudaStreamCaptureModeRelaxed && thread_capture_mode != cudaStreamCaptureModeRelaxed;
  if (thread_captures && is_strict) {
    if (thread_capture_stream && thread_capture_stream->capturing)
      invalidate(thread_capture_stream->capturing);
    card_fault(FORBIDDEN, "%s while this thread captures", what);
    return 1;
  }
  int is_captured_globally = 0;
  if (thread_mode == cudaStreamCaptureModeGlobal && !thread_captures)
    for_each_stream(see_global_capture, &is_captured_globally);
  if (is_captured_globally)
    card_fault(FORBIDDEN, "%s while another thread captures globally", what);
  return is_captured_globally;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  int old = thread_mode;
  thread_mode = *mode;
  *mode = old;
  return OK;
}

// ---- Capture

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode) {
  Stream *stream = stream_of(handle);
  if (stream == stream_of(0))
    return refuse(cudaErrorStreamCaptureImplicit, "capture of the legacy stream");
  if (stream->capturing)
    return refuse(cudaErrorIllegalState, "cudaStreamBeginCapture");
  Graph *graph = calloc(1, sizeof *graph);
  graph->id = __atomic_fetch_add(&next_id, 1, __ATOMIC_RELAXED);
  graph->origin = stream;
  graph->is_open = 1;
  stream->capture_mode = mode;
  stream->capturing = graph;
  thread_captures++;
  thread_capture_mode = mode;
  thread_capture_stream = stream;
  card_log("CAPTURE begin s%d mode %d", stream->id, mode);
  return OK;
}

typedef struct {
  Graph *graph;
  int unjoined;
} Ending;

static void leave_capture(Stream *stream, void *data) {
  Ending *ending = data;
  if (stream->capturing != ending->graph)
    return;
  ending->unjoined += stream != ending->graph->origin && !stream->is_joined;
  stream->capturing = 0;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *result) {
  Stream *stream = stream_of(handle);
  Graph *graph = stream->capturing;
  *result = 0;
  if (!graph || graph->origin != stream)
    return refuse(cudaErrorIllegalState, "cudaStreamEndCapture");
  Ending ending = {.graph = graph};
  for_each_stream(leave_capture, &ending);
  graph->is_open = 0;
  thread_captures--;
  thread_capture_stream = 0;
  card_log("CAPTURE end s%d kernels %d copies %d numbers %d%s", stream->id, graph->kernels, graph->copies,
           graph->numbers, graph->is_invalid ? " INVALID" : "");
  if (graph->is_invalid)
    return refuse(cudaErrorStreamCaptureInvalidated, "cudaStreamEndCapture");
  if (ending.unjoined) {
    card_fault(FORBIDDEN, "a capture ends before another stream's work has joined it");
    return refuse(cudaErrorStreamCaptureUnjoined, "cudaStreamEndCapture");
  }
  *result = (cudaGraph_t)graph;
  return OK;
}

static enum cudaStreamCaptureStatus status_of(Graph *graph) {
  if (!graph)
    return cudaStreamCaptureStatusNone;
  return graph->is_invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = status_of(stream_of(stream)->capturing);
  return OK;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *result, const cudaGraphNode_t **dependencies,
                                     const cudaGraphEdgeData **edges, size_t *count) {
  Graph *graph = stream_of(stream)->capturing;
  *status = status_of(graph);
  if (id)
    *id = graph ? graph->id : 0;
  if (result)
    *result = (cudaGraph_t)graph;
  if (count)
    *count = 0;
  if (dependencies)
    *dependencies = 0;
  if (edges)
    *edges = 0;
  return OK;
}
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *dependencies,
                                                const cudaGraphEdgeData *edges, size_t count, unsigned flags) {
  return OK;
}

// ---- Replay. Graphs stay: work that is queued may still name their nodes.

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *result, cudaGraph_t handle, unsigned long long flags) {
  Graph *graph = (Graph *)handle;
  Executable *executable = calloc(1, sizeof *executable);
  *executable = (Executable){graph->nodes, graph->kernels, graph->copies, graph->numbers, graph->host_functions};
  *result = (cudaGraphExec_t)executable;
  return OK;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  Executable *executable = (Executable *)handle;
  Stream *queue = stream_of(stream);
  card_log("G graph of %d kernels %d copies %d numbers s%d", executable->kernels, executable->copies,
           executable->numbers, queue->id);
  card_count(GRAPH_LAUNCHES, 1);
  if (broken())
    return broken();
  Work work = {.kind = REPLAY, .nodes = executable->nodes.head, .may_block = executable->host_functions > 0};
  return enqueue(queue, work);
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return OK; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { return OK; }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return OK; }
cudaError_t cudaGraphGetNodes(cudaGraph_t handle, cudaGraphNode_t *nodes, size_t *count) {
  Graph *graph = (Graph *)handle;
  *count = graph->kernels + graph->copies + graph->numbers;
  return OK;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *dependencies, cudaGraphEdgeData *edges,
                                         size_t *count) {
  *count = 0;
  return OK;
}
cudaError_t cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                             const cudaGraphEdgeData *edges, size_t count, struct cudaGraphNodeParams *parameters) {
  return cudaErrorNotSupported;
}
cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *handle, cudaGraph_t graph, unsigned value,
                                             unsigned flags) {
  return cudaErrorNotSupported;
}
cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *dependencies,
                                          const cudaGraphEdgeData *edges, size_t count,
                                          enum cudaStreamCaptureMode mode) {
  return cudaErrorNotSupported;
}
