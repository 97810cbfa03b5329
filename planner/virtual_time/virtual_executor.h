#pragma once
// Plays an iteration's orders in virtual time, as gpu_executor/pipeline.h runs them: three streams, each
// in order, that wait for each other exactly where the pipeline's streams do. Loads go into two sides in
// turn, weights into two layer buffers, and new rows leave from two more; a layer's loads begin while
// the layer before computes. ACT blocks that stay on the device move on copy_out, between the stores. An
// iteration's tables follow the weights fetched ahead for it, and its results follow all stores. An
// iteration is done when all streams are, including the weights ordered ahead; the next iteration is
// ordered only then. A profile gives the time of each span of work, and the latency after a wait for
// another stream. Pure; one thread.

#include <array>
#include <vector>

#include "common/device_memory.h"
#include "common/messages_generated.h"
#include "common/weight_layout.h"
#include "planner/costs/cost_model.h"
#include "planner/schedule/weight_stream.h"

namespace poise {

// What crossed the link: layers' weights, and blocks.
struct LinkVolume {
  double layers = 0, kv = 0, act = 0;
};

// A span of work of one stream.
struct VirtualSpan {
  enum class Kind : std::uint8_t { load, weights, kv_gen, attention, products, head, store } kind;
  Seconds begin, end;
  std::uint32_t layer = 0;       // that it is of
  std::uint32_t mini_batch = 0;  // of `load`, `kv_gen` and `attention`
};

class VirtualExecutor {
 public:
  VirtualExecutor(const Profile& profile, const WeightLayout& layout, const DeviceLimits& limits);

  // Runs all orders of an iteration, planned after the one before was done. `last`: none follows.
  void run(const messages::IterationT& tables, bool last);

  Seconds now() const { return now_; }  // the last iteration is done
  Seconds link_busy() const { return link_busy_; }
  Seconds compute_busy() const { return compute_busy_; }
  const LinkVolume& volume() const { return volume_; }
  // From now on spans are also added to `spans`; null: they are not.
  void trace(std::vector<VirtualSpan>* spans) { spans_ = spans; }

 private:
  struct Batch {
    Seconds load;  // its blocks over the link
    Seconds here;  // its blocks on the device
    Seconds regenerate;
    Seconds attend;
    double rows = 0, stored_kv = 0, stored_act = 0;
    double kv = 0, act = 0;  // blocks in `load`
  };
  struct Buffer {                  // of a streamed layer
    std::vector<Seconds> arrived;  // by piece
    Seconds computed;
    std::uint32_t layer = ~0u;
  };

  Batch costs_of(const messages::MiniBatchT& batch) const;
  void fetch(const std::vector<messages::WeightFetch>& pieces, std::uint32_t mini_batch);
  void run_layer(std::uint32_t layer, const std::vector<Batch>& batches,
                 const std::vector<messages::WeightFetch>& pieces);
  void run_head(double samples);
  void load(const Batch& batch, std::size_t side, Seconds stored, VirtualSpan span);
  // When a free stream begins work that needs another stream's result.
  Seconds start(Seconds free, Seconds needed) const;
  void compute(Seconds from, Seconds time, VirtualSpan span);
  // Notes a span of `time` that ends at `end`, unless it takes no time.
  void note(VirtualSpan span, Seconds end, Seconds time);
  // When pieces up to `last` of the layer are there; at once for a resident one.
  Seconds arrived(std::uint32_t layer, std::size_t last) const;

  Profile profile_;
  WeightLayout layout_;
  DeviceLimits limits_;
  WeightStream weights_;
  std::size_t qkv_piece_ = 0;  // the last that the products before attention need

  Seconds now_{}, copy_in_{}, compute_{}, copy_out_{};  // when each stream is free
  Seconds link_busy_{}, compute_busy_{};
  LinkVolume volume_;
  std::vector<VirtualSpan>* spans_ = nullptr;
  std::array<Seconds, 2> loaded_{}, here_{}, computed_{}, rows_stored_{};  // by side
  std::vector<Seconds> stored_;                                            // by layer
  std::array<Buffer, 2> buffers_;
  std::size_t visits_ = 0, groups_ = 0, fetched_layers_ = 0;
};

}  // namespace poise
