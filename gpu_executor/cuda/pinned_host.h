#pragma once
// Host memory that the GPU's copy engines reach at full speed: mappings of this process, registered
// with CUDA in slices, several threads side by side, since one thread pins no more than some 10 to
// 20 GB/s and pools are a hundred. Host thread of the device only.

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "common/units.h"

namespace poise {

class PinnedHost {
 public:
  // `cuts`: offsets within a part that no copy crosses, ascending; a slice ends only there, or with
  // its part. Fails (Exit::interrupted) where the machine does not let so much be pinned.
  void pin(std::span<const std::span<std::byte>> parts, bool read_only,
           std::span<const std::uint64_t> cuts);
  // REQUIRES: a part that was pinned.
  void unpin(std::span<std::byte> memory);

  Bytes bytes() const { return bytes_; }

 private:
  using Slices = std::vector<std::span<std::byte>>;

  std::map<const std::byte*, Slices> pinned_;  // by the beginning of its part
  Bytes bytes_{};
};

}  // namespace poise
