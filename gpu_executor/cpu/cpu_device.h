#pragma once
// The CPU device: the definition of what a device does, and the one to use where there is no GPU.
// "Device memory" is memory of this process, a stream is a thread unless `synchronous`, and a launch runs the kernels of
// kernels/cpu. Speeds of link, arithmetic and host cores can be set, to rehearse overlap: a copy or launch
// then takes at least its bytes or operations divided by the speed, by waiting. The host stream and its
// threads begin with the first work for them.

#include <cstdint>
#include <memory>
#include <optional>

#include "common/units.h"
#include "gpu_executor/device.h"

namespace poise {

struct CpuDeviceOptions {
  int threads = 1;              // that compute; the copying streams have one more each
  Bytes memory{0};              // size of the device; 0: what the host has to spare
  double link_bytes_per_s = 0;  // in each direction; 0: as fast as it goes
  double compute_flops = 0;     // operations a second; 0: as fast as it goes
  int host_threads = 0;         // that attend on host cores; 0: as many as compute
  double host_bytes_per_s = 0;  // of KV rows that they read; 0: as fast as it goes
  bool synchronous = false;     // every call returns when its work is done, in the caller's thread
  bool poison = false;          // fresh memory holds NaNs, so that reading it shows
  bool unpacks_first =
      false;  // packed weights are unpacked before they are multiplied, as on a GPU
  std::optional<std::uint64_t> jitter;  // seed of random pauses between tasks
};

class CpuDevice : public Device {
 public:
  // The streams begin nothing between these two: everything queued meanwhile is ordered by events
  // alone, not by when the host queued it.
  // `finish` releases them, too. REQUIRES: not synchronous.
  virtual void hold() = 0;
  virtual void release_streams() = 0;
};

std::unique_ptr<CpuDevice> open_cpu_device(const CpuDeviceOptions& options);

}  // namespace poise
