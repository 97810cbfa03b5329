#include "common/shared_memory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <boost/interprocess/mapped_region.hpp>
#include <boost/interprocess/shared_memory_object.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <optional>
#include <thread>
#include <utility>

#include "common/control_groups.h"
#include "common/files/regular_file.h"
#include "common/mapping/huge_pages.h"
#include "common/standing_ends.h"
#include "common/testing/failpoint.h"
#include "common/trouble.h"

namespace poise {
namespace {

namespace bip = boost::interprocess;

constexpr const char* kShmDirectory = "/dev/shm";
constexpr Bytes kReserveStep = kMiB * 32;  // 2 to 20 ms
constexpr auto kReaperPatience = std::chrono::milliseconds(2000);
constexpr auto kLookAgain = std::chrono::milliseconds(1);

// Takes the shared lock that marks this process as attached. Waits while another process checks the
// segment for removal; false if the segment was removed meanwhile or its owner ended.
bool hold(int descriptor, const std::string& name) {
  for (auto left = kReaperPatience; flock(descriptor, LOCK_SH | LOCK_NB) != 0; left -= kLookAgain) {
    if ((errno != EWOULDBLOCK && errno != EINTR) || left.count() <= 0) {
      fail("shared memory {} cannot be locked: {}", name, std::strerror(errno));
    }
    std::this_thread::sleep_for(kLookAgain);
  }
  struct stat status {};
  check(fstat(descriptor, &status) == 0, "an open segment has a status");
  return status.st_nlink > 0;
}

// An error number, or 0. Works in steps, because the kernel cannot be interrupted within a call and
// shows no progress; one thread, because the kernel admits only one to a file at a time. Huge pages
// come first, where there are any; what is not reserved then gets small ones.
int reserve_part(int descriptor, std::int64_t begin, std::int64_t end,
                 const std::function<bool()>& stop, std::atomic<std::int64_t>& huge) {
  std::int64_t step = kReserveStep.n;
  for (std::int64_t at = begin; at < end;) {
    if (stop && stop()) {
      return ECANCELED;
    }
    const std::int64_t bytes = std::min(step - at % step, end - at);  // ends where huge pages do
    huge += take_huge_pages(descriptor, at, at + bytes) ? whole_huge_pages(at, at + bytes).n : 0;
    const int error = fails_at("segment.reserve") ? errno : posix_fallocate(descriptor, at, bytes);
    if (error == EINTR) {  // all of the step is undone: take smaller ones between signals
      step = std::max(step / 2, kMiB.n);
    } else if (error != 0) {
      return error;
    } else {
      at += bytes;
    }
  }
  return 0;
}

// An error number, or 0, as the next one.
int resize(int descriptor, Bytes size) {
  return !fails_at("segment.size") && ftruncate(descriptor, size.n) == 0 ? 0 : errno;
}

int give_size(int descriptor, Bytes size) {
  struct statvfs shm {};
  if (fstatvfs(descriptor, &shm) == 0 && shm.f_blocks > 0 &&
      static_cast<std::uint64_t>(size.n) > shm.f_bavail * shm.f_frsize) {
    return ENOSPC;  // before all of it is taken from others
  }
  return resize(descriptor, size);  // so that others see how much there will be
}

[[noreturn]] void fail_to_reserve(int error, const std::string& name, Bytes size) {
  if (error == ECANCELED) {
    fail(Exit::interrupted, "reserving {} bytes of shared memory for {} was given up", size.n,
         name);
  }
  fail("{} bytes of shared memory for {} cannot be reserved ({}; {} bytes are available): {}",
       size.n, name, std::strerror(error), available_host_memory().n,
       error == EFBIG ? "raise the limit on the size of files (ulimit -f)"
                      : "use a smaller --host-memory or enlarge /dev/shm");
}

// Throws as Boost.Interprocess does where the call behind this point is to fail.
void expect_no_fault(Failpoint point) {
  if (fails_at(point)) {
    throw bip::interprocess_exception(bip::error_info(errno));
  }
}

// All of a segment, where huge pages can be mapped.
bip::mapped_region mapped(const bip::shared_memory_object& object, bip::mode_t mode) {
  bip::offset_t size = 0;
  if (object.get_size(size) && size >= kHugePage.n) {
    const auto bytes = static_cast<std::size_t>(size);
    AlignedRange range(bytes);
    if (range.data() != nullptr) {
      bip::mapped_region region(object, mode, 0, bytes, range.data(), MAP_FIXED);
      range.leave();
      return region;
    }
  }
  return {object, mode};
}

std::optional<std::int64_t> memory_available() {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  std::int64_t kib = 0;
  while (file >> key >> kib) {
    std::getline(file, unit);
    if (key == "MemAvailable:") {
      return kib * 1024;
    }
  }
  return std::nullopt;
}

}  // namespace

struct Segment::Mapping {
  bip::shared_memory_object object;
  bip::mapped_region region;
  std::atomic<std::int64_t> huge{0};  // bytes

  int descriptor() const { return object.get_mapping_handle().handle; }
};

Segment::Segment(std::string name, std::unique_ptr<Mapping> mapping)
    : name_(std::move(name)), mapping_(std::move(mapping)) {}
Segment::Segment(Segment&&) noexcept = default;
Segment& Segment::operator=(Segment&&) noexcept = default;
Segment::~Segment() = default;

std::byte* Segment::data() const { return static_cast<std::byte*>(mapping_->region.get_address()); }
Bytes Segment::huge() const { return {mapping_->huge.load(std::memory_order_relaxed)}; }
Bytes Segment::size() const { return {static_cast<std::int64_t>(mapping_->region.get_size())}; }

Segment Segment::create(const std::string& name, Bytes size, const std::function<bool()>& stop,
                        std::span<const std::uint64_t> borders) {
  return make(name, size, [&](int descriptor, std::atomic<std::int64_t>& huge) {
    std::int64_t begin = 0;
    int error = 0;
    for (const std::uint64_t border : borders) {
      const auto end = static_cast<std::int64_t>(border);
      error = error == 0 ? reserve_part(descriptor, begin, end, stop, huge) : error;
      begin = end;
    }
    return error == 0 ? reserve_part(descriptor, begin, size.n, stop, huge) : error;
  });
}

Segment Segment::create_hollow(const std::string& name, Bytes size) {
  return make(name, size, [](int, std::atomic<std::int64_t>&) { return 0; });
}

Segment Segment::make(const std::string& name, Bytes size,
                      const Reserve& reserve) {
  check(size.n > 0, "a segment has a size");
  auto mapping = std::make_unique<Mapping>();
  try {
    expect_no_fault("segment.open");
    do {  // again where a reaper came between making and locking
      mapping->object = bip::shared_memory_object(bip::create_only, name.c_str(), bip::read_write,
                                                  bip::permissions(0600));
    } while (!hold(mapping->descriptor(), name));
    failpoint("segment.unsized");
    int error = give_size(mapping->descriptor(), size);
    error = error == 0 ? reserve(mapping->descriptor(), mapping->huge) : error;
    if (error != 0) {
      bip::shared_memory_object::remove(name.c_str());
    }
    if (error != 0) {
      fail_to_reserve(error, name, size);
    }
    expect_no_fault("segment.map");
    mapping->region = mapped(mapping->object, bip::read_write);
    failpoint("segment.uninitialised");
  } catch (const bip::interprocess_exception& problem) {
    fail("shared memory {} cannot be created: {}", name, problem.what());
  }
  return {name, std::move(mapping)};
}

Segment Segment::attach(const std::string& name, Access access) {
  auto mapping = std::make_unique<Mapping>();
  try {
    const auto mode = access == Access::read_only ? bip::read_only : bip::read_write;
    expect_no_fault("segment.open");
    mapping->object = bip::shared_memory_object(bip::open_only, name.c_str(), mode);
    struct stat status {};
    check(fstat(mapping->descriptor(), &status) == 0, "an open segment has a status");
    if (status.st_uid != geteuid() || (status.st_mode & 077) != 0) {
      fail("shared memory {} belongs to user {} with mode {:o}, not to this user alone: remove it",
           name, status.st_uid, status.st_mode & 0777u);
    }
    if (!hold(mapping->descriptor(), name)) {
      fail("shared memory {} was removed: the process that made it has ended", name);
    }
    if (status.st_size == 0) {
      fail("shared memory {} is empty: its creator ended before it was ready", name);
    }
    expect_no_fault("segment.map");
    mapping->region = mapped(mapping->object, mode);
  } catch (const bip::interprocess_exception& problem) {
    fail("shared memory {} cannot be attached: {}", name, problem.what());
  }
  return {name, std::move(mapping)};
}

Segment Segment::adopt(const std::string& name) {
  const std::string path = std::string(kShmDirectory) + "/" + name;
  struct stat status {};
  if (lstat(path.c_str(), &status) != 0 || !S_ISREG(status.st_mode)) {
    fail("shared memory {} cannot be adopted: {}", name, std::strerror(errno));
  }
  if (status.st_uid == geteuid()) {  // attach refuses another user's
    chmod(path.c_str(), 0600);
  }
  Segment segment = attach(name, Access::read_write);
  check(fchmod(segment.mapping_->descriptor(), status.st_mode & 0777u) == 0,
        "the owner of a segment may change its mode");
  return segment;
}

void Segment::seal() {
  check(fchmod(mapping_->descriptor(), 0400) == 0, "the owner of a segment may change its mode");
}

void Segment::forget_pages(std::uint64_t offset, Bytes bytes) const {
  const auto page = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  const std::uint64_t first = (offset + page - 1) / page * page;
  const std::uint64_t last = (offset + static_cast<std::uint64_t>(bytes.n)) / page * page;
  if (first < last) {
    check(madvise(data() + first, last - first, MADV_DONTNEED) == 0,
          "pages of a shared mapping may be forgotten");
  }
}

void Segment::give_back(std::uint64_t offset, Bytes bytes) {
  if (fallocate(mapping_->descriptor(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                static_cast<off_t>(offset), bytes.n) != 0) {
    fail(Exit::interrupted, "{} bytes of shared memory {} cannot be given back: {}", bytes.n, name_,
         std::strerror(errno));
  }
}

void Segment::reserve_again(std::uint64_t offset, Bytes bytes, const std::function<bool()>& stop) {
  const auto begin = static_cast<std::int64_t>(offset);
  const int error =
      reserve_part(mapping_->descriptor(), begin, begin + bytes.n, stop, mapping_->huge);
  if (error != 0) {
    fail(Exit::interrupted, "{} bytes of shared memory {} cannot be reserved again: {}", bytes.n,
         name_, std::strerror(error));
  }
}

// The kernel counts by the locks. It gives up the old lock before it tries the new one.
bool Segment::is_ours_alone() const {
  const bool alone = flock(mapping_->descriptor(), LOCK_EX | LOCK_NB) == 0;
  return hold(mapping_->descriptor(), name_) && alone;  // without its name it is good for nothing
}

void Segment::make_over(const std::string& name, Bytes size) {
  const std::string folder = std::string(kShmDirectory) + "/";
  if (link((folder + name_).c_str(), (folder + name).c_str()) != 0) {
    fail("shared memory {} cannot get the name {}: {}", name_, name, std::strerror(errno));
  }
  unlink_segment(std::exchange(name_, name));
  if (size == this->size()) {
    return;
  }
  mapping_->region = bip::mapped_region();
  if (const int error = resize(mapping_->descriptor(), size); error != 0) {
    fail_to_reserve(error, name, size);
  }
  try {
    mapping_->region = mapped(mapping_->object, bip::read_write);
  } catch (const bip::interprocess_exception& problem) {
    fail("shared memory {} cannot be mapped: {}", name, problem.what());
  }
}

std::string segment_name(std::string_view run_id, std::string_view what) {
  return fmt::format("poise-{}-{}-{}", geteuid(), run_id, what);
}

void unlink_segment(const std::string& name) { bip::shared_memory_object::remove(name.c_str()); }

Bytes available_host_memory() {
  std::int64_t available = memory_available().value_or(0);
  if (const auto headroom = control_group_headroom()) {
    available = std::min(available, headroom->n);
  }
  struct statvfs shm {};
  if (statvfs(kShmDirectory, &shm) == 0) {
    available = std::min(available, static_cast<std::int64_t>(shm.f_bavail * shm.f_frsize));
  }
  return {std::max<std::int64_t>(available, 0)};
}

Control Control::create(std::string_view run_id, std::uint64_t layout_hash) {
  check(run_id.size() < sizeof(ControlSegment::run_id), "a run id fits its place");
  Control control(Segment::create(segment_name(run_id, "control"), {sizeof(ControlSegment)}));
  ControlSegment& header = *control;
  header.abi_version = kAbiVersion;
  header.control_bytes = sizeof(ControlSegment);
  header.layout_hash = layout_hash;
  run_id.copy(header.run_id, run_id.size());
  header.block_tokens = kBlockTokens;
  std::atomic_ref(header.magic)
      .store(kControlMagic, std::memory_order_release);  // last: now the rest counts
  return control;
}

Control Control::attach(std::string_view run_id) {
  Control control(Segment::attach(segment_name(run_id, "control"), Access::read_write));
  ControlSegment& header = *control;
  const std::string& name = control.segment_.name();
  if (control.segment_.size().n < static_cast<std::int64_t>(sizeof(ControlSegment)) ||
      std::atomic_ref(header.magic).load(std::memory_order_acquire) != kControlMagic) {
    fail(Exit::foreign,
         "shared memory {} is not a control segment of poise: its loader is of another build",
         name);
  }
  if (header.abi_version != kAbiVersion || header.control_bytes != sizeof(ControlSegment) ||
      header.block_tokens != kBlockTokens) {
    fail(Exit::foreign,
         "shared memory {} has layout version {} of {} bytes, this build has version {} of {} "
         "bytes: end the old "
         "loader first",
         name, header.abi_version, header.control_bytes, kAbiVersion, sizeof(ControlSegment));
  }
  if (control.run_id() != run_id) {
    fail(Exit::foreign, "shared memory {} says it belongs to run {}", name,
         shown(control.run_id()));
  }
  return control;
}

std::string Control::run_id() const {
  const char* begin = (**this).run_id;
  return {begin, strnlen(begin, sizeof(ControlSegment::run_id))};
}

Bytes memory_for_blocks(const ControlSegment& control) {
  const std::uint64_t spare = control.spare_pool_bytes.load(std::memory_order_acquire);
  Bytes room = available_host_memory() +
               Bytes{static_cast<std::int64_t>(std::min<std::uint64_t>(spare, INT64_MAX / 2))};
  if (control.pool_epoch.load(std::memory_order_acquire) != 0) {
    const StandingEnds ends = standing_ends(control.pool.region_bytes,
                                            control.pool_standing.load(std::memory_order_acquire));
    const Bytes unmade{static_cast<std::int64_t>(ends.high - ends.low)};
    room -= unmade * control.shape.num_hidden_layers;
  }
  return std::max(room, Bytes{0});
}

SharedModel model_in(const ControlSegment& control) {
  SharedModel model{.shape = control.shape, .dtype = control.dtype};
  const bool packed_as_kept =
      model.shape.packed.codes != Codes::bfloat12 || model.dtype == DType::bfloat16;
  if (!model.shape.is_sound() || model.dtype > DType::bfloat16 || !packed_as_kept) {
    fail(Exit::foreign, "the model in the control segment has impossible sizes");
  }
  model.layout = weight_layout(model.shape, model.dtype);
  if (model.layout.hash() != control.layout_hash) {
    fail(Exit::foreign,
         "the weights are laid out as another build lays them out (hash {:x}, this build has "
         "{:x}): both must be of one build",
         control.layout_hash, model.layout.hash());
  }
  const std::uint32_t released = control.released_layers.load(std::memory_order_acquire);
  if (control.weights_bytes != static_cast<std::uint64_t>(model.layout.total().n) ||
      released > static_cast<std::uint32_t>(model.layout.layers)) {
    fail(Exit::foreign,
         "the control segment has {} bytes of weights and {} released layers, the model has {} "
         "bytes and {} layers",
         control.weights_bytes, released, model.layout.total().n, model.layout.layers);
  }
  return model;
}

}  // namespace poise
