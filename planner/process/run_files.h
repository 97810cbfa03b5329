#pragma once
// The files that a run begins in its directory: results, order logs, the profile it decided by. Where a finished run lies there, it
// stays as it is until `replace`: results are opened, and its files overwritten, only then. Until then logs are held in memory. One
// thread; failures of the disk carry Exit::busy.

#include <memory>

#include "planner/process/run.h"

namespace poise {

class RunFiles {
 public:
  explicit RunFiles(Run& run) : run_(run) {}

  // Opens the results, with a line for each input line that is an error; not yet if a finished run is to be replaced. False if this run
  // itself is finished: there is nothing to do.
  bool open_results();
  // Takes the place of the finished run, if there is one. Call it once nothing can refuse this run any more. `profile`: by which the run
  // decided; may be null.
  void replace(const Profile* profile);

  std::unique_ptr<OrderLog> open_order_log() const;
  // The log of the orders that measure costs. REQUIRES: none is open.
  OrderLog& open_profile_log();
  void close_profile_log();
  void keep(const Profile& profile) const;

 private:
  void begin_results();
  std::unique_ptr<OrderLog> open(const char* name, const OrderLogLimits& limits) const;

  Run& run_;
  bool replaces_ = false;  // a finished run, which stands as yet
  std::unique_ptr<OrderLog> profile_log_;
};

}  // namespace poise
