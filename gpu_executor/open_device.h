#pragma once
// Which device a process works on, by the name given on its command line.

#include <memory>
#include <string>

#include "gpu_executor/device.h"

namespace poise {

struct DeviceOptions {
  std::string device = "auto";  // auto, cpu, cuda
  int threads = 0;              // CPU device: that compute; 0: as many as this process may use
  double link_gbps = 0;         // CPU device: 10⁹ bytes a second, each way; 0: as fast as it goes
  double compute_gflops = 0;    // CPU device: 10⁹ operations a second; 0: as fast as it goes
  int host_threads = 0;         // that attend on host cores; 0: as many as compute, or, on a GPU's
                                // host, as many as this process may use, but for one
  double host_gbps = 0;         // CPU device: 10⁹ bytes of KV rows a second there; 0: no limit
};

// Fails, with a sentence, where the device is not there; `auto` takes the best there is.
std::unique_ptr<Device> open_device(const DeviceOptions& options);

}  // namespace poise
