// Segments of shared memory that a loader did not make. Input: bytes of the weights segment and of the pool's as u32,
// then the control segment. It is attached to, and read as all processes read it and as an executor does. What is
// accepted fits: each layer of the weights, and each end of each region of the pool, lies within its segment. The mutator
// makes the layout's hash right again.

#include <fmt/core.h>
#include <sys/file.h>

#include <map>

#include "common/shared_memory.h"
#include "gpu_executor/host_memory.h"
#include "tests/fuzz/fuzzing.h"
#include "tests/gpu_executor/recording_device.h"
#include "tests/support/small_shape.h"

namespace poise::fuzzing {
namespace {

constexpr const char* kShm = "/dev/shm";
constexpr std::size_t kSizes = 2 * sizeof(std::uint32_t);
constexpr std::size_t kRunIdAt = offsetof(ControlSegment, run_id);

// The segments of one run, written as files; gone at the end. Locked, as by a process that is attached: whoever looks for
// what ended processes left leaves them alone.
class Segments {
 public:
  Segments() : run_(fmt::format("f{:x}", getpid())) {}
  Segments(const Segments&) = delete;
  Segments& operator=(const Segments&) = delete;
  ~Segments() {
    while (!files_.empty()) {
      remove(files_.begin()->first);
    }
  }

  const std::string& run() const { return run_; }
  void write(const std::string& what, std::string_view content, std::uint64_t size = 0) {
    const auto [place, fresh] = files_.try_emplace(what, -1);
    int& file = place->second;
    if (fresh) {
      const std::string path = fmt::format("{}/{}", kShm, segment_name(run_, what));
      file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
      check(file >= 0 && flock(file, LOCK_SH) == 0, "a fuzz target has segments");
    }
    const auto end = static_cast<off_t>(std::max<std::uint64_t>(size, content.size()));
    const auto bytes = static_cast<ssize_t>(content.size());
    check(pwrite(file, content.data(), content.size(), 0) == bytes && ftruncate(file, end) == 0,
          "a fuzz target writes its segments");
  }
  void remove(const std::string& what) {
    unlink_segment(segment_name(run_, what));
    close(files_.at(what));
    files_.erase(what);
  }

 private:
  std::string run_;
  std::map<std::string, int> files_;  // descriptors
};

void check_pool_of(const HostMemory& memory, const PoolNow& pool, std::uint64_t segment) {
  const HostBlocks blocks = memory.blocks(pool);
  const BlockSizes sizes = block_sizes(memory.model().shape, memory.model().dtype, KvFormat::plain);
  const LayerId last{static_cast<std::uint32_t>(memory.model().shape.num_hidden_layers) - 1};
  for (const BlockKind kind : {BlockKind::kv, BlockKind::act}) {
    for (const LayerId layer : {LayerId{0}, last}) {
      const std::uint32_t count = blocks.partition.blocks(kind);
      for (const std::uint32_t block : {0u, count - 1}) {
        const auto bytes = static_cast<std::uint64_t>(sizes.block(kind).n);
        expect(
            count == 0 || (bytes <= segment &&
                           blocks.partition.offset(sizes, layer, kind, {block}) <= segment - bytes),
            "blocks lie within their segment");
      }
    }
  }
}

void attach_as_executor(Segments& segments, std::uint64_t weights, std::uint64_t pool_bytes) {
  test::RecordingDevice device;
  HostMemory memory(segments.run(), device);
  if (!memory.weights_ready()) {
    return;
  }
  const WeightLayout& layout = memory.model().layout;
  expect(layout.total().n > 0 && static_cast<std::uint64_t>(layout.total().n) <= weights,
         "weights lie within their segment");
  const std::vector<bool> slabs(static_cast<std::size_t>(layout.layers) + 1, true);
  refusal([&] { memory.check_held(slabs); });
  memory.register_weights(slabs);
  expect(memory.fingerprint().empty() || memory.fingerprint().size() == 32,
         "a fingerprint is whole");
  if (const PoolNow pool = memory.pool(); pool.epoch != 0) {
    const std::string name = fmt::format("blocks-{}", pool.epoch);
    segments.write(name, "", pool_bytes);
    refusal([&] {
      memory.map_blocks(pool);
      check_pool_of(memory, pool, pool_bytes);
    });
    segments.remove(name);
  }
  memory.progress();
}

void read_model(const std::string& run) {
  const Control control = Control::attach(run);
  const SharedModel model = model_in(*control);
  const BlockSizes sizes = block_sizes(model.shape, model.dtype, KvFormat::plain);
  expect(sizes.kv_row.n > 0 && sizes.act_row.n > 0 && model.layout.hash() == control->layout_hash &&
             static_cast<std::uint64_t>(model.layout.total().n) == control->weights_bytes &&
             control->released_layers <= static_cast<std::uint32_t>(model.layout.layers),
         "a model's sizes are those of the segment");
}

void run_control(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t size = input.size();
  static Segments segments;
  if (size < kSizes) {
    return;
  }
  const std::uint64_t weights = read_at<std::uint32_t>(data, 0);
  const std::uint64_t pool = read_at<std::uint32_t>(data, sizeof(std::uint32_t));
  std::string control(text_of({data + kSizes, size - kSizes}));
  if (control.size() >= sizeof(ControlSegment) &&
      std::string_view(control).substr(kRunIdAt).starts_with("fuzz")) {
    control.replace(kRunIdAt, segments.run().size(), segments.run());
  }
  segments.write("control", control);
  segments.write("weights", "", weights);
  refusal([&] { attach_as_executor(segments, weights, pool); });
  refusal([&] { read_model(segments.run()); });
}

// As a loader leaves it once the weights are sealed and a pool is there.
void write_sound(std::uint8_t* data) {
  ControlSegment segment{};
  segment.magic = kControlMagic;
  segment.abi_version = kAbiVersion;
  segment.control_bytes = sizeof segment;
  std::strcpy(segment.run_id, "fuzz");
  segment.shape = testing_support::small_shape(2);
  segment.dtype = DType::float16;
  segment.block_tokens = kBlockTokens;
  const WeightLayout layout = weight_layout(segment.shape, segment.dtype);
  segment.layout_hash = layout.hash();
  segment.weights_bytes = static_cast<std::uint64_t>(layout.total().n);
  segment.loader_state = static_cast<std::uint32_t>(LoaderState::sealed);
  segment.fingerprint_ready = 1;
  segment.pool_epoch = segment.newest_pool_epoch = 1;
  segment.pool = {.region_bytes = 1 << 18, .act_blocks = 40, .kv_blocks = 20};
  segment.pool_standing = 1 << 18;
  write_at(data, 0, static_cast<std::uint32_t>(layout.total().n));
  write_at<std::uint32_t>(data, sizeof(std::uint32_t), 2 << 18);
  std::memcpy(data + kSizes, static_cast<const void*>(&segment), sizeof segment);
}

// Begins with a sound segment. Nearly always the hash is that of shape and dtype, if these can be a model's.
std::size_t mutate_control(std::uint8_t* data, std::size_t size, std::size_t most, unsigned seed) {
  if (size < kSizes && most >= kSizes + sizeof(ControlSegment)) {
    write_sound(data);
    return kSizes + sizeof(ControlSegment);
  }
  size = LLVMFuzzerMutate(data, size, most);
  if (seed % 16 == 0 || size < kSizes + sizeof(ControlSegment)) {
    return size;
  }
  const auto shape = read_at<ModelShape>(data, kSizes + offsetof(ControlSegment, shape));
  const auto dtype = read_at<DType>(data, kSizes + offsetof(ControlSegment, dtype));
  if (shape.is_sound() && dtype <= DType::bfloat16) {
    try {
      write_at(data, kSizes + offsetof(ControlSegment, layout_hash),
               weight_layout(shape, dtype).hash());
    } catch (const std::exception&) {  // the target finds out
    }
  }
  return size;
}

}  // namespace

const Target kControlTarget{"control", run_control, mutate_control};

}  // namespace poise::fuzzing
