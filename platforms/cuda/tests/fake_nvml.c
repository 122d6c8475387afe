/* A management library of two GPUs, for tests. FAKE_NVML_STATUS makes nvmlInit_v2 fail. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } memory_t;

int nvmlInit_v2(void) { const char *s = getenv("FAKE_NVML_STATUS"); return s ? atoi(s) : 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 18 ? "Driver/library version mismatch" : "?"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) { snprintf(text, size, "580.1"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(size_t)(index + 1); return 0; }
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
  snprintf(text, size, "GPU %zu", (size_t)device);
  return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned size) {
  snprintf(text, size, "GPU-%zuaa", (size_t)device);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, memory_t *memory) {
  memset(memory, 0, sizeof *memory);
  memory->total = (unsigned long long)(size_t)device << 34;
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
  *major = 9;
  *minor = 0;
  return device ? 0 : 2;
}
