// Shared memory in which the ranks of a communicator meet. Its name is gone from /dev/shm once all have joined.
#define _GNU_SOURCE
#include "nccl_ranks.h"
#include "fake_card.h"
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define NAME_BYTES 128
#define HEADER_BYTES (1 << 20)
#define PAUSE_NS 20000
#define MEET_S 120

typedef struct {
  atomic_int is_full;
} Mailbox;
struct Shared {
  char name[NAME_BYTES];
  atomic_int joined, is_aborted;
  atomic_int arrived, sense;
  Step steps[MAX_RANKS];
  int colours[MAX_RANKS], keys[MAX_RANKS];
  Mailbox boxes[MAX_RANKS][MAX_RANKS]; // [from][to]
};

static void *slot_number(Ranks *ranks, int number) {
  return (char *)ranks->shared + HEADER_BYTES + number * SLOT_BYTES;
}
void *ranks_slot(Ranks *ranks, int rank) { return slot_number(ranks, rank); }
static void *message_slot(Ranks *ranks, int from, int to) {
  return slot_number(ranks, ranks->size + from * ranks->size + to);
}

// Until *value is `wanted`; 0: aborted, or it took too long.
static int wait_for(Ranks *ranks, atomic_int *value, int wanted, const char *name) {
  struct timespec pause = {0, PAUSE_NS}, now, began;
  long limit_s = card_setting("FAKE_CARD_MEET_S", MEET_S);
  clock_gettime(CLOCK_MONOTONIC, &began);
  while (atomic_load(value) != wanted) {
    if (atomic_load(&ranks->shared->is_aborted))
      return 0;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (now.tv_sec - began.tv_sec >= limit_s) {
      card_fault(PARTED_RANKS, "rank %d of %d is alone in its collective %ld, %s, for %ld s", ranks->rank, ranks->size,
                 ranks->steps, name, limit_s);
      ranks_abort(ranks);
      return 0;
    }
    nanosleep(&pause, 0);
  }
  return 1;
}

Ranks *ranks_join(const char *name, int size, int rank) {
  size_t num_bytes = HEADER_BYTES + (size + (size_t)size * size) * SLOT_BYTES;
  int file = shm_open(name, O_CREAT | O_RDWR, 0600);
  if (size > MAX_RANKS || file < 0 || ftruncate(file, num_bytes))
    return 0;
  struct Shared *shared = mmap(0, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (shared == MAP_FAILED)
    return 0;
  Ranks *ranks = calloc(1, sizeof *ranks);
  *ranks = (Ranks){.rank = rank, .size = size, .shared = shared};
  snprintf(shared->name, NAME_BYTES, "%s", name);
  if (atomic_fetch_add(&shared->joined, 1) == size - 1)
    shm_unlink(name);
  return wait_for(ranks, &shared->joined, size, "the start") ? ranks : 0;
}

void ranks_abort(Ranks *ranks) { atomic_store(&ranks->shared->is_aborted, 1); }
int ranks_are_aborted(Ranks *ranks) { return atomic_load(&ranks->shared->is_aborted); }

int ranks_meet(Ranks *ranks, const char *name) {
  struct Shared *shared = ranks->shared;
  ranks->sense = !ranks->sense;
  if (atomic_fetch_add(&shared->arrived, 1) == ranks->size - 1) {
    atomic_store(&shared->arrived, 0);
    atomic_store(&shared->sense, ranks->sense);
    return 1;
  }
  return wait_for(ranks, &shared->sense, ranks->sense, name);
}

int ranks_begin(Ranks *ranks, const Step *step, const char *name) {
  struct Shared *shared = ranks->shared;
  ranks->steps++;
  shared->steps[ranks->rank] = *step;
  if (!ranks_meet(ranks, name))
    return 0;
  int is_same = 1;
  for (int rank = 0; rank < ranks->size; rank++)
    is_same &= !memcmp(&shared->steps[rank], step, sizeof *step);
  if (!is_same) {
    card_fault(PARTED_RANKS, "collective %ld of rank %d of %d is %s of %zu numbers: that of another rank is not",
               ranks->steps, ranks->rank, ranks->size, name, step->count);
    ranks_abort(ranks);
  }
  return is_same && !ranks_are_aborted(ranks);
}

int ranks_put(Ranks *ranks, int to, const void *piece, size_t num_bytes) {
  Mailbox *box = &ranks->shared->boxes[ranks->rank][to];
  if (!wait_for(ranks, &box->is_full, 0, "a message to another rank"))
    return 0;
  memcpy(message_slot(ranks, ranks->rank, to), piece, num_bytes);
  atomic_store(&box->is_full, 1);
  return 1;
}
int ranks_take(Ranks *ranks, int from, void *piece, size_t num_bytes) {
  Mailbox *box = &ranks->shared->boxes[from][ranks->rank];
  if (!wait_for(ranks, &box->is_full, 1, "a message from another rank"))
    return 0;
  memcpy(piece, message_slot(ranks, from, ranks->rank), num_bytes);
  atomic_store(&box->is_full, 0);
  return 1;
}

Ranks *ranks_split(Ranks *ranks, int colour, int key) {
  struct Shared *shared = ranks->shared;
  shared->colours[ranks->rank] = colour;
  shared->keys[ranks->rank] = key;
  ranks->num_parts++;
  if (!ranks_meet(ranks, "a split"))
    return 0;
  int size = 0, place = 0;
  for (int rank = 0; rank < ranks->size; rank++) {
    if (shared->colours[rank] != colour)
      continue;
    size++;
    place += shared->keys[rank] < key || (shared->keys[rank] == key && rank < ranks->rank);
  }
  if (!ranks_meet(ranks, "a split") || colour < 0)
    return 0;
  char name[NAME_BYTES + 32];
  snprintf(name, sizeof name, "%s-%d-%d", shared->name, ranks->num_parts, colour);
  return ranks_join(name, size, place);
}
