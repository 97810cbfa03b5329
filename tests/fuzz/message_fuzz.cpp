// What a peer can send to an executor. Input: messages, each behind its length as u32. They are received as the channel
// receives them (verified, with a run id), and then obeyed: a Configure within 64 MiB makes new buffers, an Iteration and
// its LayerOrders run if the order check accepts them. They run on a device that only records, and every copy must lie
// within the pool, the weights and the executor's own buffers. The twin of the order check that reads logs
// (planner/record/check/log_check.h) must find nothing wrong with an accepted layer order either.

#include <sys/mman.h>

#include "common/channel.h"
#include "gpu_executor/order_check/order_check.h"
#include "gpu_executor/pipeline.h"
#include "planner/record/check/log_check.h"
#include "tests/fuzz/fuzzing.h"
#include "tests/gpu_executor/recording_device.h"
#include "tests/support/small_shape.h"

namespace poise::fuzzing {
namespace {

constexpr std::int32_t kLayers = 2;
constexpr std::uint32_t kCredits = 8;
constexpr Bytes kMostMemory = kMiB * 64;
constexpr std::uint64_t kPoolEpoch = 1;
constexpr DType kDType = DType::float16;

// Addresses that are no memory: the device records and touches nothing, and clean pages would cost more than all else.
std::byte* device_addresses() {
  static auto* const begin = static_cast<std::byte*>(
      mmap(nullptr, static_cast<std::size_t>(2 * kMostMemory.n), PROT_NONE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  check(begin != MAP_FAILED, "a fuzz target has addresses");
  return begin;
}

// A device whose memory is known, so that it can be said of each copy whether it stays within it.
class BoundedDevice final : public test::RecordingDevice {
 public:
  void know(std::span<const std::byte> memory) { known_[memory.data()] = memory.size(); }
  void check_copies() {
    for (; seen_ < queued().size(); ++seen_) {
      for (const Copy& copy : queued()[seen_].copies) {
        expect_known(copy.from, copy.bytes);
        expect_known(copy.to, copy.bytes);
      }
      for (const WeightCopy& copy : queued()[seen_].uploads) {
        expect_known(copy.from, copy.bytes());
        expect_known(copy.to, copy.bytes());
      }
    }
  }

 protected:
  std::byte* take(Bytes size) override {
    // Between two pieces is room, so that a copy beyond one is beyond all.
    std::byte* const memory = device_addresses() + taken_;
    taken_ += round_up(size.n + 1, 256);
    check(taken_ <= 2 * kMostMemory.n, "device memory is within the cap");
    ++pieces_;
    know({memory, static_cast<std::size_t>(size.n)});
    return memory;
  }
  void give(std::byte* memory, Bytes) override {
    known_.erase(memory);
    taken_ = --pieces_ > 0 ? taken_ : 0;
  }
  std::byte* take_host(Bytes size) override {
    std::byte* memory = RecordingDevice::take(size);
    know({memory, static_cast<std::size_t>(size.n)});
    return memory;
  }
  void give_host(std::byte* memory, Bytes size) override {
    known_.erase(memory);
    RecordingDevice::give(memory, size);
  }

 private:
  void expect_known(const void* begin, Bytes bytes) const {
    const auto* first = static_cast<const std::byte*>(begin);
    auto after = known_.upper_bound(first);
    const bool inside = after != known_.begin() && bytes.n >= 0 && [&] {
      const auto& [memory, size] = *--after;
      const auto offset = static_cast<std::size_t>(first - memory);
      return offset <= size && static_cast<std::size_t>(bytes.n) <= size - offset;
    }();
    expect(inside, "an accepted order copies within known memory");
  }

  std::map<const std::byte*, std::size_t> known_;
  std::size_t seen_ = 0;
  std::int64_t taken_ = 0, pieces_ = 0;
};

// Of the model that the first inputs were recorded with: tests/fuzz/record.py.
ModelShape recorded_shape() {
  ModelShape shape = testing_support::small_shape(kLayers);
  shape.num_attention_heads = shape.num_key_value_heads = 2;
  shape.head_dim = 32;
  shape.ffn_dim = 100;
  shape.vocab_size = 500;
  shape.max_position_embeddings = 320;
  return shape;
}

// The model and the pool that all inputs meet.
struct Host {
  ModelShape shape = recorded_shape();
  WeightLayout layout = weight_layout(shape, kDType);
  PoolNow pool{.epoch = kPoolEpoch,
               .partition = {.region_bytes = 1 << 18, .act_blocks = 40, .kv_blocks = 20}};
  std::vector<std::byte> weights =
      std::vector<std::byte>(static_cast<std::size_t>(layout.total().n));
  std::vector<std::byte> blocks = std::vector<std::byte>(kLayers << 18);
};

// As an executor that has just said Hello.
class Peer {
 public:
  explicit Peer(Host& host) : host_(host) {
    device_.know(host.weights);
    device_.know(host.blocks);
    check_pool(host.pool.partition, block_sizes(host.shape, kDType, KvFormat::plain), kLayers,
               {static_cast<std::int64_t>(host.blocks.size())});
  }

  void receive(Input bytes) {
    // Aligned, as the channel's copy of a frame is.
    const auto frame = std::as_bytes(bytes);
    std::vector<std::byte> copy(frame.begin(), frame.end());
    const messages::Message* verified = message_in(copy);
    if (verified == nullptr || verified->run_id() == nullptr) {
      return;
    }
    const Received message(std::move(copy));
    const std::unique_ptr<messages::MessageT> unpacked(message->UnPack());
    if (const auto* configure = unpacked->body.AsConfigure()) {
      refusal([&] { take(*configure); });
    } else if (const auto* iteration = message->body_as_Iteration()) {
      refusal([&] { take(*message, *iteration); });
    } else if (const auto* order = message->body_as_LayerOrder()) {
      refusal([&] { take(*message, *order); });
    }
  }

 private:
  void take(const messages::ConfigureT& native) {
    flatbuffers::FlatBufferBuilder builder;
    builder.Finish(messages::Configure::Pack(builder, &native));
    const auto& configure = *flatbuffers::GetRoot<messages::Configure>(builder.GetBufferPointer());
    if (check_ && !check_->between_iterations()) {
      fail("buffers are changed only between iterations");
    }
    const DeviceLimits limits = limits_of(configure);
    check_fits(plan_device_memory(host_.shape, kDType, limits, {}), kMostMemory);
    pipeline_.reset();
    pipeline_.emplace(device_,
                      Model{.shape = host_.shape,
                            .dtype = kDType,
                            .layout = host_.layout,
                            .weights = host_.weights},
                      limits, kMostMemory);
    device_.check_copies();  // while that memory is there
    check_.emplace(host_.shape, host_.layout, limits, kCredits);
    twin_.emplace(kLayers, host_.layout.layer.pieces.size());
    tell_twin(messages::ConfigureT(native));
    messages::ReadyT ready;
    ready.credits = kCredits;
    tell_twin(std::move(ready));
  }

  void take(const messages::Message& message, const messages::Iteration& iteration) {
    if (!check_) {
      fail("an iteration comes before any Configure");
    }
    const bool alone = check_->between_iterations();
    pipeline_->begin(iteration, check_->accept(iteration, host_.pool),
                     {.data = host_.blocks.data(), .partition = host_.pool.partition});
    if (!alone) {
      twin_.reset();  // it follows one iteration at a time
    } else if (twin_) {
      twin_->take(message);
    }
  }

  void take(const messages::Message& message, const messages::LayerOrder& order) {
    if (!check_) {
      fail("an order comes before any Configure");
    }
    try {
      check_->accept(order);
    } catch (const Failure&) {
      check_->abandon();
      pipeline_->abandon();
      twin_.reset();
      throw;
    }
    pipeline_->submit(make_order(order, message.seq()));
    device_.check_copies();
    while (pipeline_->poll()) {
      check_->done();
    }
    if (twin_) {
      const std::uint64_t before = twin_->report().violations;
      twin_->take(message);
      expect(twin_->report().violations == before,
             "the twin finds nothing wrong with an accepted order",
             twin_->report().first.empty() ? "" : twin_->report().first.back());
      tell_twin(messages::LayerDoneT{});
    }
  }

  template <typename Table>
  void tell_twin(Table&& table) {
    messages::MessageT message;
    message.body.Set(std::forward<Table>(table));
    flatbuffers::FlatBufferBuilder builder;
    messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
    twin_->take(*messages::GetMessage(builder.GetBufferPointer()));
  }

  Host& host_;
  BoundedDevice device_;
  std::optional<Pipeline> pipeline_;
  std::optional<OrderCheck> check_;
  std::optional<LogCheck> twin_;
};

void run_message(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static Host host;
  Peer peer(host);
  Input rest{data, size};
  while (rest.size() >= sizeof(std::uint32_t)) {
    const std::size_t length = read_at<std::uint32_t>(rest.data(), 0);
    rest = rest.subspan(sizeof(std::uint32_t));
    peer.receive(rest.first(std::min(length, rest.size())));
    rest = rest.subspan(std::min(length, rest.size()));
  }
}

// Mostly changes numbers within messages and leaves their shape: most other changes do not verify.
std::size_t mutate_message(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  std::minstd_rand random(seed);
  if (size < 64 || random() % 4 == 0) {
    return LLVMFuzzerMutate(data, size, most);
  }
  constexpr std::uint32_t kInteresting[] = {0,  1,  2,      3,          15,         16,        17,
                                            40, 64, 0xffff, 0x7fffffff, 0x80000000, 0xffffffff};
  for (std::uint32_t changes = 1 + random() % 3; changes > 0; --changes) {
    const std::size_t at = random() % (size / 4) * 4;
    const auto word = read_at<std::uint32_t>(data, at);
    switch (random() % 4) {
      case 0:
        write_at(data, at, kInteresting[random() % std::size(kInteresting)]);
        break;
      case 1:
        write_at<std::uint32_t>(data, at, word + static_cast<std::uint32_t>(random() % 7) - 3);
        break;
      case 2:
        write_at(data, at, read_at<std::uint32_t>(data, random() % (size / 4) * 4));
        break;
      default:
        data[at + random() % 4] = static_cast<std::uint8_t>(random());
    }
  }
  return size;
}

}  // namespace

const Target kMessageTarget{"message", run_message, mutate_message};

}  // namespace poise::fuzzing
