#include "loader/loading_speed.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <set>
#include <span>
#include <thread>

#include "common/files/json.h"
#include "common/files/sha256.h"
#include "common/trouble.h"
#include "loader/checkpoint.h"
#include "loader/weight_fill.h"

namespace poise {
namespace {

constexpr std::size_t kPiece = 2 * static_cast<std::size_t>(kDigestLeaf.n);  // of one task
constexpr std::size_t kRing = 32 << 20;  // beyond the caches of a core
constexpr Bytes kMostOfAFile = kGiB * 2;
constexpr Seconds kMemoryTime{0.25};  // measured for at least as long
constexpr std::size_t kPageBytes = 4096;

// Memory of one thread, written once, so that it has pages.
class Ring {
 public:
  Ring() : bytes_(static_cast<std::byte*>(std::aligned_alloc(kPageBytes, kRing)), &std::free) {
    check(bytes_ != nullptr, "32 MiB of memory can be had");
    std::memset(bytes_.get(), 1, kRing);
  }
  // The piece that the `i`-th task of this thread uses.
  std::span<std::byte> piece(std::size_t i) const {
    return {bytes_.get() + i % (kRing / kPiece) * kPiece, kPiece};
  }

 private:
  std::unique_ptr<std::byte, void (*)(void*)> bytes_;
};

// Runs `task(ring, i)` for i from 0 on with all threads until one returns false; the seconds that took.
// Rethrows what a task threw.
Seconds time_tasks(const std::vector<Ring>& rings,
                   const std::function<bool(const Ring&, std::size_t)>& task) {
  std::atomic<std::size_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto begin = std::chrono::steady_clock::now();
  {
    std::vector<std::jthread> threads;
    for (const Ring& ring : rings) {
      threads.emplace_back([&] {
        try {
          while (task(ring, next.fetch_add(1, std::memory_order_relaxed))) {
          }
        } catch (...) {
          const std::lock_guard lock(failure_mutex);
          failure = std::current_exception();
        }
      });
    }
  }
  if (failure) {
    std::rethrow_exception(failure);
  }
  return {std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count()};
}

// The rate at which `work` goes over bytes of memory.
BytesPerSecond rate_in_memory(const std::vector<Ring>& rings,
                              const std::function<void(std::span<std::byte>, std::size_t)>& work) {
  std::atomic<std::uint64_t> pieces{0};
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(kMemoryTime.n);
  const Seconds time = time_tasks(rings, [&](const Ring& ring, std::size_t i) {
    const std::size_t own = i / rings.size();
    work(ring.piece(own), own);
    pieces.fetch_add(1, std::memory_order_relaxed);
    return std::chrono::steady_clock::now() < end;
  });
  return static_cast<double>(pieces.load()) * static_cast<double>(kPiece) / time.n;
}

std::optional<double> share_in_page_cache(const RegularFile& file) {
  const auto size = static_cast<std::size_t>(file.size().n);
  void* const mapped = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor(), 0);
  if (mapped == MAP_FAILED) {  // it is mapped only to be asked about, never read through
    return std::nullopt;
  }
  std::vector<unsigned char> pages((size + kPageBytes - 1) / kPageBytes);
  const int said = mincore(mapped, size, pages.data());
  munmap(mapped, size);
  if (said != 0) {
    return std::nullopt;
  }
  const auto there =
      std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; });
  return static_cast<double>(there) / static_cast<double>(pages.size());
}

// Past the page cache. Nothing if the file system refuses, or if there is less than one piece.
std::optional<BytesPerSecond> rate_of_disk(const RegularFile& file, Bytes most,
                                           const std::vector<Ring>& rings) {
  const auto pieces = static_cast<std::size_t>(most.n) / kPiece;
  const int descriptor = open(file.path().c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
  if (descriptor < 0 || pieces == 0) {
    if (descriptor >= 0) {
      close(descriptor);
    }
    return std::nullopt;
  }
  std::atomic<bool> refused{false};
  const Seconds time = time_tasks(rings, [&](const Ring& ring, std::size_t i) {
    if (i >= pieces || refused) {
      return false;
    }
    const auto piece = ring.piece(i / rings.size());
    const ssize_t got =
        pread(descriptor, piece.data(), piece.size(), static_cast<off_t>(i * kPiece));
    if (got != static_cast<ssize_t>(piece.size()) && !(got < 0 && errno == EINTR)) {
      refused = true;
    }
    return true;
  });
  close(descriptor);
  return refused ? std::nullopt : std::optional(static_cast<double>(pieces * kPiece) / time.n);
}

BytesPerSecond rate_of_reading(const RegularFile& file, Bytes most,
                               const std::vector<Ring>& rings) {
  const auto size = static_cast<std::size_t>(most.n);
  const Seconds time = time_tasks(rings, [&](const Ring& ring, std::size_t i) {
    if (i * kPiece >= size) {
      return false;
    }
    const auto piece = ring.piece(i / rings.size());
    file.read_exactly(i * kPiece, piece.first(std::min(kPiece, size - i * kPiece)));
    return true;
  });
  return static_cast<double>(size) / time.n;
}

FileSpeed speed_of(const RegularFile& file, const std::vector<Ring>& rings) {
  FileSpeed speed{.name = file.path().filename().string(),
                  .size = file.size(),
                  .measured = std::min(file.size(), kMostOfAFile)};
  speed.cached = share_in_page_cache(file);
  speed.disk = rate_of_disk(file, speed.measured, rings);  // leaves the page cache as it is
  speed.read = rate_of_reading(file, speed.measured, rings);
  return speed;
}

}  // namespace

LoadingSpeed measure_loading(const std::filesystem::path& model) {
  const Checkpoint checkpoint(model);
  std::set<const SafetensorsFile*> files;
  for (const auto& [name, place] : checkpoint.tensors()) {
    files.insert(place.file);
  }
  const std::vector<Ring> rings(fill_threads());
  LoadingSpeed speed{.threads = rings.size()};
  for (const SafetensorsFile* file : files) {
    speed.files.push_back(speed_of(file->file(), rings));
  }
  std::ranges::sort(speed.files, {}, &FileSpeed::name);
  speed.digest = rate_in_memory(rings, [](std::span<std::byte> piece, std::size_t) {
    sha256_pair(piece.first(kPiece / 2), piece.last(kPiece / 2));
  });
  std::atomic<std::uint64_t> kept{0};  // so that the sums are computed
  speed.memory_read = rate_in_memory(rings, [&](std::span<std::byte> piece, std::size_t) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(piece.data());
    kept.fetch_add(std::accumulate(words, words + kPiece / sizeof *words, std::uint64_t{0}),
                   std::memory_order_relaxed);
  });
  speed.memory_copied =
      rate_in_memory(rings,
                     [](std::span<std::byte> piece, std::size_t i) {
                       std::memcpy(i % 2 == 0 ? piece.data() + kPiece / 2 : piece.data(),
                                   i % 2 == 0 ? piece.data() : piece.data() + kPiece / 2,
                                   kPiece / 2);
                     }) /
      2;
  return speed;
}

std::string to_json(const LoadingSpeed& speed) {
  using Json = nlohmann::ordered_json;
  Json json{{"threads", speed.threads},
            {"digest_bytes_per_s", speed.digest},
            {"memory_copied_bytes_per_s", speed.memory_copied},
            {"memory_read_bytes_per_s", speed.memory_read},
            {"files", Json::array()}};
  for (const FileSpeed& file : speed.files) {
    json["files"].push_back({{"name", file.name},
                             {"bytes", file.size.n},
                             {"measured_bytes", file.measured.n},
                             {"cached_share", file.cached ? Json(*file.cached) : Json()},
                             {"read_bytes_per_s", file.read},
                             {"disk_bytes_per_s", file.disk ? Json(*file.disk) : Json()}});
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace poise
