#pragma once
// All access to named shared memory: POSIX segments through Boost.Interprocess, always mode 0600, with
// their pages reserved at creation (a full /dev/shm is then an error, not a SIGBUS later). A Segment
// is a name, a mapping and a descriptor with a shared flock. By the flock the kernel counts attached
// processes; the supervisor removes a segment that no living process is attached to. Segments are
// movable, close on destruction, and never unlink themselves: the loader or the supervisor does
// (`unlink_segment`).

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "common/shared_layout.h"
#include "common/units.h"
#include "common/weight_layout.h"

namespace poise {

enum class Access { read_only, read_write };

class Segment {
 public:
  // A new segment, zeroed and fully reserved. Fails if there is not enough room (the sentence gives
  // the bytes wanted and free) or if the name is taken. `name` has no leading slash. A large segment
  // takes seconds: meanwhile the file in /dev/shm already has its final size, and its blocks show the
  // progress. `stop`, if given, is polled meanwhile; if it returns true, this fails (Exit::interrupted). No huge page
  // (mapping/huge_pages.h) lies across `borders` (rising offsets): what can be given back by itself comes back whole, also
  // where its neighbours are pinned.
  static Segment create(const std::string& name, Bytes size,
                        const std::function<bool()>& stop = nullptr,
                        std::span<const std::uint64_t> borders = {});
  // The same, but nothing of it is reserved yet: the caller does that with `reserve_again`, part by part, before
  // anyone touches the part. Fails if there is not enough room now.
  static Segment create_hollow(const std::string& name, Bytes size);
  // Attaches to an existing segment; fails if there is none, if it belongs to another user, or if
  // other users may read it.
  static Segment attach(const std::string& name, Access access);
  // Attaches with write access to a segment of an ended process, also to one that was sealed: its mode stays
  // what it was. The caller is its owner from now on.
  static Segment adopt(const std::string& name);

  Segment(Segment&&) noexcept;
  Segment& operator=(Segment&&) noexcept;
  ~Segment();

  std::byte* data() const;
  Bytes size() const;
  const std::string& name() const { return name_; }
  // Of all that this process reserved, again or not: what came in huge pages. Any thread.
  Bytes huge() const;
  // From now on no other process can attach with write access: the mode becomes 0400. This mapping
  // stays writable.
  void seal();

  // Takes the whole pages of a part out of this process's page tables; the segment keeps them, and the next
  // access maps them again. A process that ends takes them out page by page, 0.3 s for 8 GiB, while its
  // successor waits. Any thread.
  void forget_pages(std::uint64_t offset, Bytes bytes) const;

  // Gives the memory of a part (whole pages) back, or reserves it again, zeroed. Only the segment's
  // owner may call these: who created or adopted it. No process may touch a part between the two. Reserving
  // may take seconds; `stop` is as above.
  void give_back(std::uint64_t offset, Bytes bytes);
  void reserve_again(std::uint64_t offset, Bytes bytes,
                     const std::function<bool()>& stop = nullptr);

  // Whether no other process is attached, dying ones included. Nobody may be about to attach.
  bool is_ours_alone() const;
  // Gives the segment another name, then another size. What lay in it stays there; what it grows by is not reserved
  // yet, as in `create_hollow`. After a failure it is good for nothing, and has the new name. REQUIRES: adopted or
  // created by this process, is_ours_alone().
  void make_over(const std::string& name, Bytes size);

 private:
  struct Mapping;
  using Reserve = std::function<int(int descriptor, std::atomic<std::int64_t>& huge)>;
  static Segment make(const std::string& name, Bytes size, const Reserve& reserve);
  Segment(std::string name, std::unique_ptr<Mapping> mapping);

  std::string name_;
  std::unique_ptr<Mapping> mapping_;
};

// "poise-UID-RUN-control" and its like.
std::string segment_name(std::string_view run_id, std::string_view what);
void unlink_segment(const std::string& name);  // does nothing if there is none
// Bytes that /dev/shm and the machine (MemAvailable, cgroup limit) still allow.
Bytes available_host_memory();

// The control segment, typed and checked: magic, ABI version and size are verified before any other
// field is read.
class Control {
 public:
  static Control create(std::string_view run_id, std::uint64_t layout_hash);
  static Control attach(std::string_view run_id);

  ControlSegment& operator*() const { return *reinterpret_cast<ControlSegment*>(segment_.data()); }
  ControlSegment* operator->() const { return &**this; }
  std::string run_id() const;
  const Segment& segment() const { return segment_; }

 private:
  explicit Control(Segment segment) : segment_(std::move(segment)) {}
  Segment segment_;
};

// What a new pool of this loader may have: what is available, less what is still being made of the present one, and the
// memory of an earlier pool that the loader keeps.
Bytes memory_for_blocks(const ControlSegment& control);

// The model that a control segment describes. Every process that attaches reads it here, because what
// another process wrote is not trusted: sizes that no model has would overflow all arithmetic on them.
// A copy: what was checked does not change afterwards.
struct SharedModel {
  ModelShape shape{};
  DType dtype{};
  WeightLayout layout{};
};
// REQUIRES: the loader's state is past `creating`. Fails (Exit::foreign) if shape and dtype are none
// that a loader writes, if this build lays the weights out otherwise, or if their sizes contradict.
SharedModel model_in(const ControlSegment& control);

}  // namespace poise
