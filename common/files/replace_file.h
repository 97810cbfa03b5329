#pragma once
// The only way to replace a small file: writes a temporary file beside it, then renames it over the old
// one. A reader sees the old content or the new, never a part. On an error the old file stays and the
// temporary one is removed. Any thread may call it.

#include <filesystem>
#include <string_view>

namespace poise {

// Closes a file descriptor that it owns; -1 is none.
class OwnDescriptor {
 public:
  explicit OwnDescriptor(int descriptor) : descriptor_(descriptor) {}
  ~OwnDescriptor();
  OwnDescriptor(const OwnDescriptor&) = delete;
  OwnDescriptor& operator=(const OwnDescriptor&) = delete;
  int get() const { return descriptor_; }

 private:
  int descriptor_;
};

struct Replacement {
  // On disk before this returns, name and content: it survives a power cut. Otherwise it survives the
  // end of this process only, and costs no wait for the disk.
  bool durable = true;
  // Several processes may replace the file at a time: each has a temporary file of its own.
  bool shared = false;
};

// Readable by this user alone. Fails (Exit::busy) with a sentence that names the file and what to do.
void replace_file(const std::filesystem::path& path, std::string_view content,
                  Replacement how = {});

// Makes durable which names the directory holds. Fails likewise.
void sync_directory(const std::filesystem::path& directory);

// "FILE cannot be written: No space left on device (make room on its disk)", as Exit::busy.
[[noreturn]] void fail_to_write(const std::filesystem::path& path, int error);

}  // namespace poise
