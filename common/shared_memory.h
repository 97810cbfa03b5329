#pragma once
// Named shared memory, the only door to it: POSIX segments through Boost.Interprocess, always mode
// 0600, their pages reserved at creation (a full /dev/shm is an error then, not a SIGBUS later). A
// Segment is a name, a mapping and a descriptor with a shared flock: the kernel's count of who is
// attached, by which the supervisor knows what nobody alive holds any more and removes it. Segments are
// movable, close on destruction, and never unlink by themselves: their creator's owner decides
// (`unlink_segment`).

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "common/shared_layout.h"
#include "common/units.h"

namespace poise {

enum class Access { read_only, read_write };

class Segment {
 public:
  // A new segment, zeroed, reserved in full. Fails with the bytes wanted and free if there is not
  // enough room, and where the name is taken. `name` has no leading slash. A large one takes
  // seconds: meanwhile the file in /dev/shm has its size already, and as many blocks as are
  // reserved; `stop`, where given, is asked again and again, and true is Exit::interrupted.
  static Segment create(const std::string& name, Bytes size,
                        const std::function<bool()>& stop = nullptr);
  // Attaches to an existing one; fails where there is none, where it belongs to another user or
  // others may read it.
  static Segment attach(const std::string& name, Access access);

  Segment(Segment&&) noexcept;
  Segment& operator=(Segment&&) noexcept;
  ~Segment();

  std::byte* data() const;
  Bytes size() const;
  const std::string& name() const { return name_; }
  // From now on nobody else attaches with write access: the mode becomes 0400. This mapping stays
  // writable.
  void seal();

  // Gives a part's memory back, or reserves it again (zeroed), for the one who made the segment.
  // Whole pages. A part given back must not be touched by anybody until it is reserved again; that may
  // take seconds, and `stop` is as above.
  void give_back(std::uint64_t offset, Bytes bytes);
  void reserve_again(std::uint64_t offset, Bytes bytes,
                     const std::function<bool()>& stop = nullptr);

 private:
  struct Mapping;
  Segment(std::string name, std::unique_ptr<Mapping> mapping);

  std::string name_;
  std::unique_ptr<Mapping> mapping_;
};

// "poise-UID-RUN-control" and its like.
std::string segment_name(std::string_view run_id, std::string_view what);
void unlink_segment(const std::string& name);  // nothing happens where there is none
// Bytes that /dev/shm and the machine (MemAvailable, cgroup limit) still allow.
Bytes available_host_memory();

// The control segment, typed and checked: magic, ABI version and size before any other field is
// believed.
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

}  // namespace poise
