#pragma once
// Plays an iteration's orders in virtual time, as gpu_executor/pipeline.h runs them: three streams, each
// in order, that wait for each other exactly where the pipeline's streams do. Loads go into two or three sides in
// turn, ACT blocks before KV blocks, weights into two layer buffers, and new rows leave from two more; a
// layer's loads begin while the layer before computes. ACT blocks that stay on the device move on
// copy_out, between the stores. An iteration's tables follow the weights fetched ahead for it, and its
// results follow all stores. An iteration is done when all streams are, including the weights ordered
// ahead; the next iteration is ordered only then. Mini-batches that host cores attend come last in a layer: their
// queries and new rows go down on copy_out once the group's queries are made, before all other groups where they
// have one of their own (sent_ahead); host cores work on a stream of their own, and the output comes up on compute. A profile gives the time of each span of work, and the
// latency after a wait for another stream. Pure; one thread.

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/row_groups.h"
#include "common/weight_layout.h"
#include "common/windows/unseen_blocks.h"
#include "planner/costs/cost_model.h"
#include "planner/schedule/weight_stream.h"
#include "planner/virtual_time/batch_cost.h"
#include "planner/virtual_time/virtual_streams.h"
#include "planner/virtual_time/virtual_weights.h"

namespace poise {

// What crossed the link: layers' weights, and blocks.
struct LinkVolume {
  double layers = 0, kv = 0, act = 0;
};

class VirtualExecutor {
 public:
  VirtualExecutor(const Profile& profile, const WeightLayout& layout, const DeviceLimits& limits,
                  LayerWindows windows = {});

  // Runs all orders of an iteration, planned after the one before was done. `last`: none follows. Returns the idle time by which
  // it spread the layers' weights; empty if all are resident.
  LinkIdle run(const messages::IterationT& tables, bool last);

  Seconds now() const { return now_; }  // the last iteration is done
  Seconds link_busy() const { return busy_.link; }
  Seconds compute_busy() const { return busy_.compute; }
  Seconds host_busy() const { return busy_.host; }
  const LinkVolume& volume() const { return volume_; }
  // From now on spans are also added to `spans`; null: they are not.
  void trace(std::vector<VirtualSpan>* spans) { streams_.trace(spans); }

 private:
  // An iteration's mini-batches.
  struct Batches {
    std::vector<BatchCost> costs, in_window;  // `in_window`: in layers that have one
    std::vector<RowGroup> groups;
    std::vector<GroupCost> products;  // by group
    std::uint32_t count;

    const std::vector<BatchCost>& costs_with(bool window) const {
      return window ? in_window : costs;
    }
  };

  struct Busy {
    Seconds link{}, compute{}, host{};
    Profile::Paces paces{};  // of the layer that is run
  };

  // What computation of a mini-batch's blocks waits for, and frees.
  struct Side {
    Seconds act_loaded, loaded, here, computed;
  };

  void fetch(const std::vector<messages::WeightFetch>& pieces, std::uint32_t mini_batch);
  void run_embedding(const messages::IterationT& tables,
                     const std::vector<messages::WeightFetch>& pieces);
  void run_layer(std::uint32_t layer, const Batches& batches,
                 const std::vector<messages::WeightFetch>& pieces);
  void run_head(double samples);
  void load(const BatchCost& batch, std::size_t side, Seconds stored, VirtualSpan span);
  void regenerate(const BatchCost& batch, std::size_t side, VirtualSpan span);
  // Returns when the new rows of a group have left; nothing: none do.
  std::optional<Seconds> store(const Batches& batches, const RowGroup& group, std::uint32_t layer);
  // Sends what host cores attend of a group; returns when they are done with each of its mini-batches, nothing if they attend none.
  std::vector<Seconds> send(const std::vector<BatchCost>& costs, const RowGroup& group,
                            std::uint32_t layer);
  Seconds compute(Seconds needed, Seconds time, VirtualSpan span);

  Profile profile_;
  DeviceLimits limits_;
  LayerWindows windows_;
  std::int32_t layers_;
  double kv_share_;  // of `qkv`: keys and values
  WeightStream weight_stream_;
  VirtualWeights weights_;
  VirtualStreams streams_;

  Seconds now_{};
  Busy busy_;
  LinkVolume volume_;
  std::vector<Side> sides_;
  std::array<Seconds, 2> rows_stored_{};  // by side of new rows
  std::vector<Seconds> stored_;           // by layer
  std::size_t visits_ = 0, groups_ = 0;
};

}  // namespace poise
