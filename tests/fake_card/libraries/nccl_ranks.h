// The ranks of one communicator: processes of this machine that share memory and meet in it.
#pragma once
#include <stddef.h>

#define MAX_RANKS 16
#define SLOT_BYTES (64ull << 20) // of each rank, and of each message between two; what is larger goes piece by piece

// What a rank does in a collective; all have to do the same.
typedef struct {
  int kind, type, operation, root;
  size_t count;
} Step;

typedef struct Ranks {
  int rank, size;
  int num_parts; // communicators that were split off
  long steps;    // collectives that this rank has been in
  int sense;
  struct Shared *shared;
} Ranks;

// Waits until all have come, at most FAKE_CARD_MEET_S seconds; 0: they have not.
Ranks *ranks_join(const char *name, int size, int rank);
// Begins a collective: waits for the others, and compares what they do. 0: they do something else, or do not come.
int ranks_begin(Ranks *ranks, const Step *step, const char *name);
// Waits for the others in the middle of one, or at its end.
int ranks_meet(Ranks *ranks, const char *name);
// What a rank shows the others until the next meeting.
void *ranks_slot(Ranks *ranks, int rank);
// One piece of a message from one rank to another.
int ranks_put(Ranks *ranks, int to, const void *piece, size_t num_bytes);
int ranks_take(Ranks *ranks, int from, void *piece, size_t num_bytes);
void ranks_abort(Ranks *ranks);
int ranks_are_aborted(Ranks *ranks);
// The part of those ranks that gave the same colour, in the order of their keys; 0 for a negative colour.
Ranks *ranks_split(Ranks *ranks, int colour, int key);
