// Stands in for libnccl.so.2 between processes of one machine. All-reduce, reduce, reduce-scatter, all-gather, broadcast,
// send and receive really compute, over shared memory, and are queued on their stream as functions of the host, so that
// they can be captured and replayed. As with NCCL nobody notices a rank that is gone; one that does not come, or comes to
// another collective, is a fault (PARTED_RANKS).
//
// Not kept: groups of calls (each is queued at once), abortion from outside, registration of memory.
#include "fake_card.h"
#include "nccl_ranks.h"
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SYSTEM_ERROR 2
#define REMOTE_ERROR 6
#define DONE_BY_ALL (-1)

extern int cudaLaunchHostFunc(void *, void (*)(void *), void *);

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, NUM_TYPES }; // ncclDataType_t
enum { SUM, PRODUCT, MAX, MIN, AVERAGE };                                                          // ncclRedOp_t
enum { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECEIVE };
static const char *const NAMES[] = {"ncclAllReduce", "ncclReduce",    "ncclReduceScatter", "ncclAllGather",
                                    "ncclBroadcast", "ncclSend", "ncclRecv"};
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

typedef struct {
  char bytes[128];
} UniqueId;
typedef struct {
  Ranks *ranks;
  const void *input;
  void *output;
  Step step; // its count: numbers that each rank gives
} Job;

// ---- Numbers

static double number(const void *values, size_t i, int type) {
  uint32_t bits;
  float value;
  switch (type) {
  case INT8:
    return ((const int8_t *)values)[i];
  case UINT8:
    return ((const uint8_t *)values)[i];
  case INT32:
    return ((const int32_t *)values)[i];
  case UINT32:
    return ((const uint32_t *)values)[i];
  case INT64:
  case UINT64:
    return ((const int64_t *)values)[i];
  case FLOAT16:
    return ((const _Float16 *)values)[i];
  case FLOAT32:
    return ((const float *)values)[i];
  case FLOAT64:
    return ((const double *)values)[i];
  default: // BFLOAT16
    bits = (uint32_t)((const uint16_t *)values)[i] << 16;
    memcpy(&value, &bits, 4);
    return value;
  }
}
static void store(void *values, size_t i, int type, double value) {
  float single = value;
  uint32_t bits;
  switch (type) {
  case INT8:
  case UINT8:
    ((uint8_t *)values)[i] = (uint8_t)(int64_t)value;
    break;
  case INT32:
  case UINT32:
    ((uint32_t *)values)[i] = (uint32_t)(int64_t)value;
    break;
  case INT64:
  case UINT64:
    ((int64_t *)values)[i] = value;
    break;
  case FLOAT16:
    ((_Float16 *)values)[i] = value;
    break;
  case FLOAT32:
    ((float *)values)[i] = single;
    break;
  case FLOAT64:
    ((double *)values)[i] = value;
    break;
  default: // BFLOAT16, to the nearest even
    memcpy(&bits, &single, 4);
    ((uint16_t *)values)[i] = isnan(single) ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  }
}
static double combine(double one, double other, int operation) {
  switch (operation) {
  case PRODUCT:
    return one * other;
  case MAX:
    return other > one ? other : one;
  case MIN:
    return other < one ? other : one;
  default:
    return one + other;
  }
}
// In the order of the ranks, so that all of them get the same bits. `from`: of each rank's slot.
static void reduce(Ranks *ranks, size_t from, void *output, size_t count, const Step *step) {
  for (size_t i = 0; i < count; i++) {
    double total = number(ranks_slot(ranks, 0), from + i, step->type);
    for (int rank = 1; rank < ranks->size; rank++)
      total = combine(total, number(ranks_slot(ranks, rank), from + i, step->type), step->operation);
    store(output, i, step->type, step->operation == AVERAGE ? total / ranks->size : total);
  }
}

// ---- Collectives, piece by piece

static void finish_piece(Job *job, char *output, size_t count) {
  Ranks *ranks = job->ranks;
  size_t size = SIZES[job->step.type];
  switch (job->step.kind) {
  case ALL_GATHER:
    for (int rank = 0; rank < ranks->size; rank++)
      memcpy(output + rank * job->step.count * size, ranks_slot(ranks, rank), count * size);
    break;
  case BROADCAST:
    memcpy(output, ranks_slot(ranks, job->step.root), count * size);
    break;
  case REDUCE:
    if (ranks->rank != job->step.root)
      break;
  case ALL_REDUCE:
    reduce(ranks, 0, output, count, &job->step);
  }
}
// A reduce-scatter is an all-reduce of each part in turn, of which its own rank keeps the result.
static void reduce_scatter(Job *job) {
  Ranks *ranks = job->ranks;
  size_t size = SIZES[job->step.type], part = job->step.count / ranks->size, room = SLOT_BYTES / size;
  for (int owner = 0; owner < ranks->size; owner++)
    for (size_t at = 0; at < part; at += room) {
      size_t count = part - at < room ? part - at : room;
      memcpy(ranks_slot(ranks, ranks->rank), (const char *)job->input + (owner * part + at) * size, count * size);
      if (!ranks_meet(ranks, NAMES[REDUCE_SCATTER]))
        return;
      if (owner == ranks->rank)
        reduce(ranks, 0, (char *)job->output + at * size, count, &job->step);
      if (!ranks_meet(ranks, NAMES[REDUCE_SCATTER]))
        return;
    }
}
static void run_collective(void *data) { // the job stays: a captured one runs at each replay
  Job *job = data;
  Ranks *ranks = job->ranks;
  const char *name = NAMES[job->step.kind];
  if (!ranks_begin(ranks, &job->step, name))
    return;
  if (job->step.kind == REDUCE_SCATTER) {
    reduce_scatter(job);
    return;
  }
  size_t size = SIZES[job->step.type], room = SLOT_BYTES / size;
  for (size_t at = 0; at < job->step.count; at += room) {
    size_t count = job->step.count - at < room ? job->step.count - at : room;
    memcpy(ranks_slot(ranks, ranks->rank), (const char *)job->input + at * size, count * size);
    if (!ranks_meet(ranks, name))
      return;
    finish_piece(job, (char *)job->output + at * size, count);
    if (!ranks_meet(ranks, name))
      return;
  }
}
static void run_message(void *data) {
  Job *job = data;
  size_t total = job->step.count * SIZES[job->step.type];
  job->ranks->steps++;
  for (size_t at = 0; at < total; at += SLOT_BYTES) {
    size_t num_bytes = total - at < SLOT_BYTES ? total - at : SLOT_BYTES;
    int is_done = job->step.kind == SEND
                      ? ranks_put(job->ranks, job->step.root, (const char *)job->input + at, num_bytes)
                      : ranks_take(job->ranks, job->step.root, (char *)job->output + at, num_bytes);
    if (!is_done)
      return;
  }
}
static int queue(Ranks *ranks, const void *input, void *output, Step step, void *stream) {
  if (step.type >= NUM_TYPES)
    return SYSTEM_ERROR;
  Job *job = malloc(sizeof *job);
  *job = (Job){ranks, input, output, step};
  char text[96];
  snprintf(text, sizeof text, "%s %zu", NAMES[step.kind], step.count * SIZES[step.type]);
  card_launch(text, 1, 1, 1, stream, 0);
  return cudaLaunchHostFunc(stream, step.kind >= SEND ? run_message : run_collective, job);
}

int ncclAllReduce(const void *input, void *output, size_t count, int type, int operation, Ranks *ranks, void *stream) {
  return queue(ranks, input, output, (Step){ALL_REDUCE, type, operation, DONE_BY_ALL, count}, stream);
}
int ncclReduce(const void *input, void *output, size_t count, int type, int operation, int root, Ranks *ranks,
               void *stream) {
  return queue(ranks, input, output, (Step){REDUCE, type, operation, root, count}, stream);
}
int ncclReduceScatter(const void *input, void *output, size_t count, int type, int operation, Ranks *ranks,
                      void *stream) {
  Step step = {REDUCE_SCATTER, type, operation, DONE_BY_ALL, count * ranks->size};
  return queue(ranks, input, output, step, stream);
}
int ncclAllGather(const void *input, void *output, size_t count, int type, Ranks *ranks, void *stream) {
  return queue(ranks, input, output, (Step){ALL_GATHER, type, 0, DONE_BY_ALL, count}, stream);
}
int ncclBroadcast(const void *input, void *output, size_t count, int type, int root, Ranks *ranks, void *stream) {
  return queue(ranks, input, output, (Step){BROADCAST, type, 0, root, count}, stream);
}
int ncclBcast(void *values, size_t count, int type, int root, Ranks *ranks, void *stream) {
  return ncclBroadcast(values, values, count, type, root, ranks, stream);
}
int ncclSend(const void *input, size_t count, int type, int peer, Ranks *ranks, void *stream) {
  return queue(ranks, input, 0, (Step){SEND, type, 0, peer, count}, stream);
}
int ncclRecv(void *output, size_t count, int type, int peer, Ranks *ranks, void *stream) {
  return queue(ranks, 0, output, (Step){RECEIVE, type, 0, peer, count}, stream);
}

// ---- Communicators

int ncclGetUniqueId(UniqueId *id) {
  static long made;
  memset(id, 0, sizeof *id);
  snprintf(id->bytes, sizeof id->bytes, "/fake-card-%d-%ld-%ld", getpid(), random(), ++made);
  return 0;
}
int ncclCommInitRankConfig(Ranks **result, int size, UniqueId id, int rank, void *config) {
  *result = ranks_join(id.bytes, size, rank);
  return *result ? 0 : SYSTEM_ERROR;
}
int ncclCommInitRank(Ranks **result, int size, UniqueId id, int rank) {
  return ncclCommInitRankConfig(result, size, id, rank, 0);
}
int ncclCommInitRankScalable(Ranks **result, int size, int rank, int num_ids, UniqueId *ids, void *config) {
  return ncclCommInitRankConfig(result, size, ids[0], rank, config);
}
int ncclCommSplit(Ranks *ranks, int colour, int key, Ranks **result, void *config) {
  *result = ranks_split(ranks, colour, key);
  return *result || colour < 0 ? 0 : SYSTEM_ERROR;
}
int ncclCommAbort(Ranks *ranks) {
  ranks_abort(ranks);
  return 0;
}
int ncclCommCount(Ranks *ranks, int *count) {
  *count = ranks->size;
  return 0;
}
int ncclCommUserRank(Ranks *ranks, int *rank) {
  *rank = ranks->rank;
  return 0;
}
int ncclCommGetAsyncError(Ranks *ranks, int *error) {
  *error = ranks_are_aborted(ranks) ? REMOTE_ERROR : 0;
  return 0;
}
const char *ncclGetErrorString(int error) { return error ? "an error of the stand-in NCCL" : "no error"; }
const char *ncclGetLastError(void *ranks) { return "see the lines of FAKE CARD"; }
int ncclGetVersion(int *version) {
  *version = 22809;
  return 0;
}
