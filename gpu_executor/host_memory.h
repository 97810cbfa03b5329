#pragma once
// What the loader shares with the executor: the control segment, the weights (mapped read-only once
// they are sealed) and the block pool of the current epoch, registered with the device where it
// copies from them. Offsets in the control segment are used only once they were checked against the
// sizes of the segments. One thread; the device must outlive this.
//
// A pool may be mapped while the loader still makes its memory: parts are registered as they stand, and an iteration
// whose blocks do not stand yet waits.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "common/liveness/progress.h"
#include "common/shared_memory.h"
#include "gpu_executor/device.h"
#include "gpu_executor/order_check/order_check.h"
#include "gpu_executor/pipeline.h"

namespace poise {

class HostMemory {
 public:
  // Attaches to the control segment; fails where there is none.
  HostMemory(const std::string& run_id, Device& device);
  ~HostMemory();
  HostMemory(const HostMemory&) = delete;
  HostMemory& operator=(const HostMemory&) = delete;

  // True once the weights are sealed and mapped. Fails where the loader ends, or where header and
  // weights contradict each other.
  bool weights_ready();
  // REQUIRES: weights_ready, as below.
  const Model& model() const { return *model_; }
  std::uint64_t layout_hash() const { return control_->layout_hash; }
  // Slabs of the weights, a word for each (0: outer, 1 + l: layer l). Fails where one is of a layer
  // that the loader has released.
  void check_held(const std::vector<bool>& slabs) const;
  // From now on these are registered, and no others. REQUIRES: held; the device is not at work.
  void register_weights(const std::vector<bool>& slabs);
  // SHA-256 of the model; empty until the loader has it.
  std::vector<std::uint8_t> fingerprint() const;

  // The pool as the control segment has it now.
  PoolNow pool() const;
  // Whether the blocks of this pool are the ones mapped; if not, `map_blocks` may be called where
  // nothing uses those mapped before. Fails where header and segment contradict each other.
  bool mapped(const PoolNow& pool) const { return blocks_ && blocks_epoch_ == pool.epoch; }
  void map_blocks(const PoolNow& pool);
  void unmap_blocks();  // likewise
  // Registers what has come to stand of the mapped pool since. Cheap if there is nothing.
  void register_standing();
  // Whether all blocks of the host that an iteration names may be used; true as well where it is to be refused. Fails
  // where the loader ends before they stand.
  bool stands(const messages::Iteration& iteration) const;
  HostBlocks blocks(const PoolNow& pool) const;

  // Says that the work loop moved.
  void progress();

 private:
  void map_weights();
  std::span<std::byte> all_of(const Segment& segment) const;

  const std::string run_id_;
  Device& device_;
  Control control_;
  ProgressPublisher publisher_;
  std::optional<Segment> weights_;
  std::vector<std::optional<Registration>> weights_registrations_;  // by slab
  std::optional<Model> model_;
  std::optional<Segment> blocks_;
  std::vector<Registration> blocks_registrations_;
  std::uint64_t region_bytes_ = 0;  // of the mapped pool
  std::uint64_t registered_ = 0;    // bytes at each end of each region
  std::uint64_t blocks_epoch_ = 0;
};

}  // namespace poise
