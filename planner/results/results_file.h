#pragma once
// Finished answers on disk: RUN/results.jsonl.partial, a line for each input line that is done, in
// the order in which they were done. A line is written with one write(2) to the end of the file and
// made durable in groups (1 s or 256 lines at most); a write that stops halfway is taken back, so
// that after any end at most the last line is torn, and `resume` cuts that one off. What cannot be
// written is kept, up to a bound, and tried again with the next call. Time is the caller's. One
// thread; one process at a time (run.lock). Failures of the disk carry Exit::busy.
//
//   RUN/results.jsonl.partial     while the run lasts; leaves by rename to the output
//   RUN/results.jsonl.published   where it went (planner/results/results_output.h)

#include <cstdint>
#include <deque>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/units.h"

namespace poise {

struct ResultCounts {
  std::uint64_t answers = 0;
  std::uint64_t errors = 0;
  std::uint64_t lines() const { return answers + errors; }
};

class ResultsFile {
 public:
  // A run's first: fails where the directory holds one already.
  static ResultsFile create(const std::filesystem::path& run_dir);
  // Goes on with one. Cuts off what a crash damaged: a torn last line, and after a power failure the lines
  // from the first zero byte on, if these are no more than may not have been durable. Fails, naming the
  // line, where it holds anything else that is not a result of one of the input's lines: nothing is
  // dropped silently.
  // `verified`: takes back all lines behind so many bytes, which a call of size() gave.
  static ResultsFile resume(const std::filesystem::path& run_dir,
                            const std::vector<RequestId>& input_lines,
                            std::optional<Bytes> verified = std::nullopt);

  ResultsFile(ResultsFile&&) noexcept;
  ResultsFile& operator=(ResultsFile&&) noexcept;
  ~ResultsFile();  // writes nothing: call `sync` before an orderly end

  bool is_done(RequestId line) const { return line.n < done_.size() && done_[line.n]; }
  ResultCounts counts() const { return counts_; }
  Bytes cut_off() const { return cut_off_; }        // by `resume`: what a crash damaged
  Bytes taken_back() const { return taken_back_; }  // by `resume`: what was not verified

  // One result line, without its newline. REQUIRES: the input line is not done.
  // Fails with Exit::busy where the disk takes no more; the line is kept nonetheless (unless 64 MiB
  // are kept already; is_done says) and the next call tries again. It is lost only with the process,
  // and then computed anew.
  void append(RequestId line, bool error, std::string_view result, Seconds now);
  // Makes durable what has waited for 1 s; call it now and then.
  void tick(Seconds now);
  // Writes what was kept and makes everything durable.
  void sync();
  Bytes kept() const { return kept_bytes_; }
  // Of the whole lines in the file; lines behind it are not older than this call.
  Bytes size() const { return {size_}; }
  // Takes back all lines behind `size`, which a call of size() gave, for good: another process computes them again. Only
  // destruction may follow.
  void take_back(Bytes size);

  const std::filesystem::path& path() const { return path_; }
  int descriptor() const { return descriptor_; }

 private:
  ResultsFile(std::filesystem::path path, int flags);

  void keep_first(Bytes size);
  void read_lines(const std::vector<RequestId>& input_lines);
  void mark_done(RequestId line, bool error);
  void write_kept();
  void write_line(std::string_view line_with_newline);
  void make_durable();
  void check_unbroken() const;
  void check_still_ours() const;
  [[noreturn]] void fail_to_write(const char* what, int error) const;

  std::filesystem::path path_;
  int descriptor_ = -1;
  std::int64_t size_ = 0;  // bytes of whole lines in the file
  std::vector<bool> done_;
  ResultCounts counts_;
  Bytes cut_off_{};
  Bytes taken_back_{};
  std::deque<std::string> kept_;  // lines the disk has not taken yet, newline included
  Bytes kept_bytes_{};
  int waiting_ = 0;          // lines written and not yet durable
  Seconds waiting_since_{};  // when the first of them was written
  bool broken_ = false;
};

}  // namespace poise
