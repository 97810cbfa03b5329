#pragma once
// The peers of a planner under test, over real sockets and shared memory: a model that is loaded, and
// a loader and an executor that are threads here. The executor runs orders on symbols, so that every
// answer can be predicted, and does them as late as it may.

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "common/channel.h"
#include "common/shared_memory.h"
#include "common/weight_layout.h"
#include "tests/planner/schedule/symbolic_executor.h"
#include "tests/support/model_files.h"

namespace poise::testing_support {

inline constexpr int kModelContext = 256;
inline constexpr std::uint32_t kCredits = 3;

inline ModelShape test_shape() {
  ModelShape shape = tiny_shape();
  shape.vocab_size = kVocabulary;
  shape.max_position_embeddings = kModelContext;
  return shape;
}

inline std::string new_run_id() {
  static std::atomic<int> count{0};
  return fmt::format("{:x}{:x}", getpid() + 0x10000000, ++count);
}

// What the loader of a run has done: a sealed model, as far as a planner looks at it.
class SealedModel {
 public:
  explicit SealedModel(const std::string& run_id)
      : control_(Control::create(run_id, weight_layout(test_shape(), DType::float32).hash())) {
    control_->shape = test_shape();
    control_->dtype = DType::float32;
    control_->weights_bytes =
        static_cast<std::uint64_t>(weight_layout(test_shape(), DType::float32).total().n);
    control_->fingerprint[0] = 7;
    control_->fingerprint_ready.store(1);
    control_->loader_state.store(static_cast<std::uint32_t>(LoaderState::sealed));
  }
  ~SealedModel() { unlink_segment(control_.segment().name()); }

  Control& control() { return control_; }
  Identity identity() { return {control_.run_id(), control_->layout_hash}; }

 private:
  Control control_;
};

// A peer in a thread of its own; ends with its object.
class Peer {
 public:
  virtual ~Peer() = default;
  void start() {
    thread_ = std::jthread([this](const std::stop_token& stop) { serve_until(stop); });
  }

 protected:
  virtual void serve_until(const std::stop_token& stop) = 0;
  std::jthread thread_;
};

class FakeLoader final : public Peer {
 public:
  FakeLoader(std::string socket, Identity identity)
      : socket_(std::move(socket)), identity_(std::move(identity)) {}
  ~FakeLoader() override { thread_ = {}; }

  std::atomic<bool> refuses{false};
  std::atomic<int> releases{0};
  std::atomic<std::uint64_t> cap{0};  // of the last claim
  // The answer to the check of the weights that is asked for; nothing: not yet.
  std::function<std::optional<messages::WeightsCheckedT>()> check;
  Allocation granted() const {
    const std::scoped_lock lock(mutex_);
    return granted_;
  }

 private:
  void serve_until(const std::stop_token& stop) override {
    const auto channel = serve(socket_, identity_);
    Control control = Control::attach(identity_.run_id);
    std::optional<std::uint32_t> asked;  // the serial of a check
    while (!stop.stop_requested()) {
      const auto message = channel->receive({0.01});
      if (auto checked = asked ? check() : std::nullopt) {
        checked->serial = *std::exchange(asked, std::nullopt);
        send(*channel, *std::move(checked));
      }
      if (!message) {
        continue;
      }
      if ((*message)->body_type() == messages::Body::PoolRelease) {
        ++releases;
        control->pool_epoch = 0;
        messages::PoolGrantT grant;
        grant.granted = true;
        send(*channel, std::move(grant));
      } else if ((*message)->body_type() == messages::Body::Hello) {
        send(*channel, messages::LoaderReplyT{});
      } else if (const auto* wanted = (*message)->body_as_WeightsCheck()) {
        asked = wanted->serial();
      } else if (const auto* claim = (*message)->body_as_PoolClaim()) {
        EXPECT_EQ(control->pool_epoch, 0u) << "a pool was claimed beside another one's";
        cap = claim->host_memory();
        messages::PoolGrantT grant;
        grant.granted = !refuses;
        grant.sentence = refuses ? "no room for a pool" : "";
        grant.pool_epoch = 5;
        grant.region_bytes = claim->region_bytes();
        grant.act_blocks = claim->act_blocks();
        grant.kv_blocks = claim->kv_blocks();
        const std::scoped_lock lock(mutex_);
        granted_ = {.act_blocks = claim->act_blocks(), .kv_blocks = claim->kv_blocks()};
        send(*channel, std::move(grant));
      }
    }
  }

  std::string socket_;
  Identity identity_;
  mutable std::mutex mutex_;
  Allocation granted_;
};

class FakeExecutor final : public Peer {
 public:
  FakeExecutor(std::string socket, Identity identity, const FakeLoader& loader)
      : socket_(std::move(socket)), identity_(std::move(identity)), loader_(loader) {}
  ~FakeExecutor() override { thread_ = {}; }

  std::atomic<int> refuses_iteration{-1};
  std::atomic<std::uint32_t> breaks_request{0};  // its logits are not finite
  std::atomic<bool> breaks_all{false};
  std::atomic<std::uint32_t> breaks_prompt{0};   // its prompt's values are no numbers
  std::atomic<std::uint32_t> dies_of{0};    // the request whose rows kill it,
  std::atomic<std::uint32_t> dies_from{0};  // once it has as many tokens in blocks
  std::atomic<int> deaths{0};  // each is followed by another executor
  std::atomic<int> iterations{0};
  std::atomic<int> most_undone{0};
  int* told_most = nullptr;  // where to say how many sequences an iteration had at most
  std::atomic<bool> told_to_stop{false};
  std::string device = "cpu, of symbols";  // before it starts, as the next
  messages::DeviceKind device_kind = messages::DeviceKind::Cpu;

 private:
  void serve_until(const std::stop_token& stop) override {
    std::unique_ptr<Channel> channel;
    bool greeted = false;
    while (!stop.stop_requested() && !told_to_stop) {
      if (!channel) {
        channel = connect(socket_, identity_);
        channel->set_epochs(
            {.planner = 0, .executor = 77 + static_cast<std::uint32_t>(deaths.load())});
        greeted = false;
      }
      if (!greeted && channel->connected()) {
        messages::HelloT hello;
        hello.protocol = kProtocol;
        hello.build = build_id();
        hello.layout_hash = identity_.layout_hash;
        hello.process = static_cast<std::uint32_t>(Process::gpu_executor);
        hello.device = device;
        hello.device_kind = device_kind;
        hello.device_memory = std::uint64_t{1} << 30;
        hello.after_death = deaths > 0;
        greeted = send(*channel, std::move(hello));
      }
      const auto message = channel->receive(patience());
      if (message) {
        take(*channel, *message);
        if (is_to_die(*message)) {
          ++deaths;
          undone_.clear();
          channel.reset();
        }
      } else if (!undone_.empty()) {
        const Received order = std::move(undone_.front());
        undone_.pop_front();
        run_order(*channel, *order->body_as_LayerOrder(), order->seq());
      }
    }
  }

  // Orders are done as late as can be, so that credits are used up.
  Seconds patience() const {
    if (undone_.empty()) {
      return {0.01};
    }
    const bool more = undone_.back()->body_as_LayerOrder()->stage() + 1 < stages();
    return {more && undone_.size() < kCredits ? 1.0 : 0.0};
  }
  bool is_to_die(const Received& message) const {
    return dies_of != 0 && message->body_as_Iteration() != nullptr &&
           std::ranges::any_of(tables_.mini_batches, [&](const auto& batch) {
             return std::ranges::any_of(batch->sequences, [&](const messages::Sequence& sequence) {
               return sequence.request() == dies_of && sequence.context() >= dies_from;
             });
           });
  }
  static std::uint32_t stages() {
    return static_cast<std::uint32_t>(test_shape().num_hidden_layers) + 2;
  }

  void take(Channel& channel, const Received& received) {
    const messages::Message& message = *received;
    if (const auto* configure = message.body_as_Configure()) {
      limits_ = {.act_slots = configure->act_slots(),
                 .kv_slots = configure->kv_slots(),
                 .tokens = 1 << 24,
                 .rows = configure->max_mini_batch_rows(),
                 .sequences = configure->max_sequences()};
      Allocation blocks = loader_.granted();
      blocks.gpu_act_blocks = configure->gpu_act_blocks();
      blocks.gpu_kv_blocks = configure->gpu_kv_blocks();
      if (executor_ && deaths > 0) {
        executor_->lose_device();  // the host keeps its blocks
      } else {
        executor_ = std::make_unique<SymbolicExecutor>(blocks, limits_, configure->max_rows());
      }
      send(channel, messages::ReadyT{.credits = kCredits});
    } else if (const auto* iteration = message.body_as_Iteration()) {
      EXPECT_EQ(iteration->pool_epoch(), 5u);
      iteration->UnPackTo(&tables_);
      next_stage_ = 0;
      ++iterations;
      int sequences = 0;
      for (const auto& batch : tables_.mini_batches) {
        sequences += static_cast<int>(batch->sequences.size());
      }
      if (told_most != nullptr) {
        *told_most = std::max(*told_most, sequences);
      }
    } else if (message.body_type() == messages::Body::LayerOrder) {
      undone_.push_back(received);
      EXPECT_LE(undone_.size(), kCredits);
      most_undone = std::max<int>(most_undone, static_cast<int>(undone_.size()));
    } else if (message.body_type() == messages::Body::Stop) {
      told_to_stop = true;
    }
  }

  void run_order(Channel& channel, const messages::LayerOrder& order, std::uint64_t seq) {
    if (iterations == refuses_iteration) {
      send(channel, messages::RejectedT{.order = seq, .sentence = "it is not to be run"});
      return;
    }
    EXPECT_EQ(order.iteration(), tables_.iteration);
    EXPECT_EQ(order.stage(), next_stage_++);
    EXPECT_EQ(order.mini_batches()->size(), tables_.mini_batches.size());
    messages::LayerDoneT done;
    done.iteration = order.iteration();
    done.stage = order.stage();
    done.order = seq;
    done.copy_in = std::make_unique<messages::StreamReport>(100, 2'000'000, 3'000'000);
    done.compute = std::make_unique<messages::StreamReport>(0, 4'000'000, 5'000'000);
    done.copy_out = std::make_unique<messages::StreamReport>(10, 1'000'000, 0);
    done.link = std::make_unique<messages::LinkBytes>(1, 2, 3, 4);
    send(channel, std::move(done));
    if (next_stage_ == stages()) {
      send(channel, results());
    }
  }

  messages::IterationDoneT results() {
    std::map<std::uint32_t, const messages::SampleT*> samples;
    for (const auto& batch : tables_.mini_batches) {
      for (const auto& sample : batch->samples) {
        samples[batch->sequences[sample->sequence].request()] = sample.get();
      }
    }
    messages::IterationDoneT all;
    all.iteration = tables_.iteration;
    for (const auto& [request, result] : executor_->run(tables_)) {
      auto one = std::make_unique<messages::SampleResultT>();
      one->request = request;
      one->finite = !breaks_all && request != breaks_request;
      one->token = result.token.value_or(-1);
      if (samples.at(request)->logprobs >= 0 && result.token) {
        one->chosen = std::make_unique<messages::LogprobRowT>();
        one->chosen->token = *result.token;
        one->chosen->logprob = -0.5F;
      }
      for (const auto& [position, target] : result.prompt_targets) {
        auto row = std::make_unique<messages::LogprobRowT>();
        row->token = target;
        row->logprob =
            request == breaks_prompt ? std::nanf("") : -static_cast<float>(position);
        one->prompt.push_back(std::move(row));
      }
      all.results.push_back(std::move(one));
    }
    return all;
  }

  std::string socket_;
  Identity identity_;
  const FakeLoader& loader_;
  PackLimits limits_;
  std::unique_ptr<SymbolicExecutor> executor_;
  messages::IterationT tables_;
  std::uint32_t next_stage_ = 0;
  std::deque<Received> undone_;  // orders
};

}  // namespace poise::testing_support
