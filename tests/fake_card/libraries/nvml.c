// Stands in for libnvidia-ml.so.1, as far as torch asks it about links between cards. With FAKE_CARD_NVLINK=1 each card
// has a link to each other one, else there are none.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK 0
#define NOT_SUPPORTED 3
#define INVALID_ARGUMENT 2

typedef struct {
  char legacy_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
} PciInfo;

static int setting(const char *name, int otherwise) {
  const char *text = getenv(name);
  return text ? atoi(text) : otherwise;
}
static int num_devices(void) { return setting("FAKE_CARD_DEVICES", 1); }
static int has_links(void) { return setting("FAKE_CARD_NVLINK", 0); }
// A handle is 8 + the number of its card; the other end of link n is card n, or the card after for those behind it.
static int index_of(void *device) { return (int)(intptr_t)device - 8; }
static int other_end(void *device, unsigned link) { return (int)link + ((int)link >= index_of(device)); }

int nvmlInit_v2(void) { return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return OK;
}
int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = num_devices();
  return OK;
}
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { // "0000:01:00.0" is card 0
  unsigned number = 1;
  sscanf(bus, "%*x:%x", &number);
  *device = (void *)(intptr_t)(8 + number - 1);
  return OK;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
  if (!has_links() || other_end(device, link) >= num_devices())
    return NOT_SUPPORTED;
  *type = 0; // a card
  return OK;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, PciInfo *info) {
  if (!has_links() || other_end(device, link) >= num_devices())
    return NOT_SUPPORTED;
  memset(info, 0, sizeof *info);
  snprintf(info->id, sizeof info->id, "0000:%02x:00.0", other_end(device, link) + 1);
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, void *processes) {
  *count = 0;
  return OK;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) {
  memset((char *)info + 4, 0, 32); // behind the version of the structure
  return OK;
}
