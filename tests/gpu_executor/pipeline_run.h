#pragma once
// A run of the pipeline on a plan, from messages to results, with host memory in place of the
// shared segments. What it tells is made for being compared bit by bit.

#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cmath>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "common/trouble.h"
#include "gpu_executor/cpu/cpu_device.h"
#include "gpu_executor/order_check/order_check.h"
#include "gpu_executor/pipeline.h"
#include "tests/gpu_executor/shared_bytes.h"
#include "tests/gpu_executor/small_planner.h"
#include "tests/gpu_executor/tiny_model.h"

namespace poise::test {

// A message's table by itself, packed and verified as if it had been received.
template <typename Table>
class Packed {
 public:
  explicit Packed(const typename Table::NativeTableType& native) {
    builder_.Finish(Table::Pack(builder_, &native));
    EXPECT_TRUE(verified());
  }
  bool verified() const {
    flatbuffers::Verifier verifier(builder_.GetBufferPointer(), builder_.GetSize());
    return verifier.VerifyBuffer<Table>(nullptr);
  }
  const Table& operator*() const {
    return *flatbuffers::GetRoot<Table>(builder_.GetBufferPointer());
  }
  std::span<std::uint32_t> words() {
    return {reinterpret_cast<std::uint32_t*>(builder_.GetBufferPointer()),
            builder_.GetSize() / sizeof(std::uint32_t)};
  }

 private:
  flatbuffers::FlatBufferBuilder builder_;
};

struct Setting {
  DeviceLimits limits{.resident_layers = 1,
                      .max_rows = 256,
                      .max_mini_batch_rows = 128,
                      .max_sequences = 8,
                      .act_slots = 24,
                      .kv_slots = 24,
                      .logits_rows = 5,
                      .max_context = 128,
                      .logit_edits = 4};
  CpuDeviceOptions device{.threads = 1, .memory = kMiB * 64, .poison = true};
  std::uint32_t act_blocks = 64, kv_blocks = 64;
  bool hold = false;   // the streams begin when all orders are queued
  bool trace = false;  // reports hold spans
  Seconds rest{};      // before the next iteration is queued, once all are done
};

struct Outcome {
  // What was told of the token at a position of a request (from 1), and of the one sampled: bits.
  std::map<std::pair<std::uint32_t, std::size_t>, std::vector<std::uint32_t>> rows;
  std::vector<messages::LayerDoneT> layers;
};

inline std::vector<std::uint32_t> bits_of(const messages::LogprobRowT& row) {
  std::vector<std::uint32_t> bits{static_cast<std::uint32_t>(row.token),
                                  std::bit_cast<std::uint32_t>(row.logprob)};
  for (const messages::TokenLogprob& top : row.top) {
    bits.push_back(static_cast<std::uint32_t>(top.token()));
    bits.push_back(std::bit_cast<std::uint32_t>(top.logprob()));
  }
  return bits;
}

class PipelineRun {
 public:
  PipelineRun(const TinyModel& model, const Plan& plan, const Setting& setting)
      : PipelineRun(model, plan, setting, open_cpu_device(setting.device)) {}
  // On another device: of `setting.device` nothing counts, and it must not ask to hold.
  PipelineRun(const TinyModel& model, const Plan& plan, const Setting& setting,
              std::unique_ptr<Device> device)
      : plan_(plan),
        setting_(setting),
        sizes_(block_sizes(model.shape, model.dtype, setting.limits.kv_format)),
        partition_(partition()),
        pool_(static_cast<std::size_t>(partition_.region_bytes) *
              static_cast<std::size_t>(model.shape.num_hidden_layers)),
        weights_(model.bytes),
        device_(std::move(device)),
        cpu_(dynamic_cast<CpuDevice*>(device_.get())),
        pool_registered_(device_->register_host(pool_.all(), false)),
        weights_registered_(device_->register_host(weights_.all(), true)),
        pipeline_(*device_,
                  {.shape = model.shape,
                   .dtype = model.dtype,
                   .layout = model.layout,
                   .weights = weights_.all()},
                  setting.limits, cpu_ != nullptr ? setting.device.memory : device_->memory(),
                  setting.trace),
        check_(model.shape, model.layout, setting.limits, 1'000'000),
        planner_(plan, model.layout, setting.limits, partition_) {}

  Outcome run() {
    Outcome outcome;
    if (setting_.hold) {
      cpu_->hold();
    }
    while (true) {
      const Planned planned = planner_.next();
      if (planned.orders.empty()) {
        break;
      }
      queue(planned);
      if (setting_.rest.n > 0) {
        finish(outcome);
        std::this_thread::sleep_for(std::chrono::duration<double>(setting_.rest.n));
      }
    }
    if (setting_.hold) {
      cpu_->release_streams();
    }
    finish(outcome);
    return outcome;
  }

  // From now on each message is changed so before it is checked, and no results are read.
  void mutate(std::function<void(std::span<std::uint32_t>)> how) { mutate_ = std::move(how); }

  Pipeline& pipeline() { return pipeline_; }
  CpuDevice& device() { return *cpu_; }

 private:
  void finish(Outcome& outcome) {
    while (!pipeline_.idle()) {
      if (auto done = pipeline_.poll({1})) {
        check_.done();
        outcome.layers.push_back(std::move(done->layer));
        if (done->iteration && !mutate_) {
          read(*done->iteration, outcome);
        }
      }
    }
  }

  PoolPartition partition() const {
    const std::int64_t bytes = sizes_.block(BlockKind::act).n * setting_.act_blocks +
                               sizes_.block(BlockKind::kv).n * setting_.kv_blocks;
    return {.region_bytes = static_cast<std::uint64_t>(round_up(bytes, 4096)),
            .act_blocks = setting_.act_blocks,
            .kv_blocks = setting_.kv_blocks};
  }

  void queue(const Planned& planned) {
    Packed<messages::Iteration> tables(planned.tables);
    change(tables);
    const PoolNow pool{.epoch = 1, .partition = partition_, .kv_format = setting_.limits.kv_format};
    pipeline_.begin(*tables, check_.accept(*tables, pool),
                    {.data = pool_.data(), .partition = partition_});
    for (const messages::LayerOrderT& native : planned.orders) {
      Packed<messages::LayerOrder> order(native);
      change(order);
      check_.accept(*order);
      pipeline_.submit(make_order(*order, ++seq_));
    }
  }

  template <typename Table>
  void change(Packed<Table>& message) {
    if (mutate_) {
      mutate_(message.words());
      if (!message.verified()) {
        throw Failure("no message");  // what a channel would not let through
      }
    }
  }

  void read(const messages::IterationDoneT& done, Outcome& outcome) {
    for (const auto& result : done.results) {
      EXPECT_TRUE(result->finite);
      std::size_t& position = positions_[result->request];
      const auto& tokens = plan_.sequences[result->request];
      // Every prompt row tells of the token behind it; a sequence's last row has none.
      for (const auto& row : result->prompt) {
        outcome.rows[{result->request, ++position}] = bits_of(*row);
        EXPECT_EQ(row->token, tokens[position]);
      }
      if (position + 1 == tokens.size()) {
        outcome.rows[{result->request, tokens.size()}] = bits_of(*result->chosen);
      }
    }
  }

  const Plan& plan_;
  const Setting setting_;
  const BlockSizes sizes_;
  const PoolPartition partition_;
  SharedBytes pool_, weights_;
  std::unique_ptr<Device> device_;
  CpuDevice* const cpu_;  // the same, or null
  const Registration pool_registered_, weights_registered_;
  Pipeline pipeline_;
  OrderCheck check_;
  SmallPlanner planner_;
  std::uint64_t seq_ = 0;
  std::function<void(std::span<std::uint32_t>)> mutate_;
  std::map<std::uint32_t, std::size_t> positions_;
};

inline Outcome run_pipeline(const TinyModel& model, const Plan& plan, const Setting& setting = {}) {
  return PipelineRun(model, plan, setting).run();
}

inline std::vector<std::vector<std::int32_t>> random_sequences(const ModelShape& shape,
                                                               std::vector<int> lengths,
                                                               std::uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::vector<std::int32_t>> sequences;
  for (const int length : lengths) {
    auto& tokens = sequences.emplace_back(static_cast<std::size_t>(length));
    for (std::int32_t& token : tokens) {
      token = static_cast<std::int32_t>(random() % static_cast<unsigned>(shape.vocab_size));
    }
  }
  return sequences;
}

inline BlockKind all_kv(std::uint32_t, std::uint32_t) { return BlockKind::kv; }
inline BlockKind all_act(std::uint32_t, std::uint32_t) { return BlockKind::act; }
inline BlockKind mixed(std::uint32_t request, std::uint32_t block) {
  return (request * 5 + block * 3) % 4 < 2 ? BlockKind::kv : BlockKind::act;
}

inline Plan six_sequences(const ModelShape& shape) {
  return {.sequences = random_sequences(shape, {37, 21, 1, 50, 16, 33}, 7), .kind = all_kv};
}

// Every logprob that was told, and every best token, against straight loops in double.
inline void expect_as_plain(const TinyModel& model, const Plan& plan, const Outcome& outcome,
                            double tolerance, KvFormat kv_format = KvFormat::plain) {
  PlainForward plain(model, kv_format);
  std::size_t compared = 0;
  for (std::uint32_t request = 0; request < plan.sequences.size(); ++request) {
    const auto& tokens = plan.sequences[request];
    const auto logits = plain.logits(tokens);
    for (std::size_t position = 1; position <= tokens.size(); ++position) {
      const auto& row = outcome.rows.at({request, position});
      const auto& expected = logits[position - 1];
      double total = 0;
      for (const double logit : expected) {
        total += std::exp(logit);
      }
      const auto logprob = [&](std::uint32_t token) { return expected[token] - std::log(total); };
      for (std::size_t i = 0; i < row.size(); i += 2) {
        EXPECT_NEAR(std::bit_cast<float>(row[i + 1]), logprob(row[i]), tolerance)
            << "request " << request << " position " << position;
        ++compared;
      }
      if (position == tokens.size()) {
        EXPECT_NEAR(expected[row[0]], *std::ranges::max_element(expected), tolerance);
      }
    }
  }
  EXPECT_GT(compared, 100u);
}

}  // namespace poise::test
