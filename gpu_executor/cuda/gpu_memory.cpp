#include "gpu_executor/cuda/gpu_memory.h"

#include <dlfcn.h>

namespace poise {
namespace {

// The part of NVML's documented ABI that is needed here.
using NvmlDevice = struct NvmlDeviceOpaque*;
struct NvmlMemory {
  unsigned long long total, free, used;
};
struct Nvml {
  int (*init)() = nullptr;
  int (*handle)(const char* pci_bus_id, NvmlDevice*) = nullptr;
  int (*memory)(NvmlDevice, NvmlMemory*) = nullptr;

  Nvml() {
    void* library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return;
    }
    find(library, &init, "nvmlInit_v2");
    find(library, &handle, "nvmlDeviceGetHandleByPciBusId_v2");
    find(library, &memory, "nvmlDeviceGetMemoryInfo");
    usable = init != nullptr && handle != nullptr && memory != nullptr && init() == 0;
  }
  bool usable = false;

 private:
  template <typename Function>
  static void find(void* library, Function* function, const char* name) {
    *function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

}  // namespace

std::optional<Bytes> gpu_memory_in_use(const std::string& pci_bus_id) {
  static const Nvml nvml;
  NvmlDevice device = nullptr;
  NvmlMemory memory{};
  if (!nvml.usable || nvml.handle(pci_bus_id.c_str(), &device) != 0 ||
      nvml.memory(device, &memory) != 0) {
    return std::nullopt;
  }
  return Bytes{static_cast<std::int64_t>(memory.used)};
}

}  // namespace poise
