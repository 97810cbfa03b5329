#pragma once
// The planner's side of the connection to a front: a program that sends requests while the run goes on, and
// takes their answers (launch/server/README.md). A message is a JSON object, and frames of bytes behind it.
//
//   from the front                                    frames behind it
//   {"front": ID}                                     a front that starts, or that was asked who it is
//   {"submit": [{"id", "line", "stream", "chat"} …]}  of each: its batch line; with "chat" its rendered prompt
//   {"cancel": [id …]}
//   to the front
//   {"planner": ID, "context", …}                     once a second, between iterations: a planner that starts asks for everything
//   {"events": [{"id", "choice", "at", "text", …} …,  a stream's text, from byte `at` of it on; "choice" if not the first
//               {"id", "frame", "waited", …} …]}      a result line, in that frame (from 1); times in seconds; "token_at": when the planner
//                                                     had its first token, "event_at": the token with its first event, on CLOCK_MONOTONIC
//
// Ids are the front's, below kFirstFurtherChoice, each used once; a line with "n" has one result line for all its choices. If another front says
// its ID, the requests of the one before it are dropped: that front has died. If the connection ends, the planner drops all requests, too,
// and has another ID on the next one, so that the front sends them again. During an iteration nothing is sent. The
// planner keeps what it could not send and begins no iteration meanwhile, so a slow front slows the run, and
// memory is bounded by the requests that are open. One thread; no call blocks longer than its timeout.

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/channel.h"
#include "planner/links/histogram.h"
#include "planner/requests/request_line.h"
#include "planner/results/answer_book.h"

namespace poise {

class FrontLink {
 public:
  // `rules` refers to a tokenizer that outlives this.
  FrontLink(std::unique_ptr<FrameChannel> channel, RequestRules rules);

  // Handles what has arrived; waits at most `timeout` if nothing has. True if a message came. Requests that
  // ended before this call are forgotten by it. REQUIRES: no iteration is under way.
  bool step(Seconds timeout);
  // Valid until the step after they ended.
  std::vector<const Request*> take_arrived() { return std::exchange(arrived_, {}); }
  // Requests that were taken as arrived, and for which nobody waits any more.
  // The choices of a line stand together, the last one last.
  std::vector<const Request*> take_cancelled() { return std::exchange(cancelled_, {}); }

  // A request was in the iteration from `began` to `now`; `generated`: a token came of it. The time since its
  // token before goes to `between`.
  void ran(RequestId request, bool generated, Seconds began, Seconds now, Histogram& between);
  bool streams(RequestId request) const;
  // Of a stream that goes on: what is new in its text. `tokens`: all of the answer's.
  void progress(RequestId request, const Answer& answer, std::span<const TokenId> tokens);
  void finish(const ResultLine& line);
  // Sends what there is to send; false if some of it must wait.
  bool flush(Seconds now);

 private:
  struct OpenRequest {
    std::unique_ptr<const Request> request;
    std::vector<RequestId> further;  // of a first choice: the others of its line
    bool streams = false;
    std::size_t sent_text = 0;    // bytes, of an echoed prompt too
    std::size_t sent_tokens = 0;  // whose ids or logprobs were sent
    Seconds arrived{}, began{-1}, first_token{-1}, first_event{-1}, last_token{-1};
  };

  void take(std::span<const std::string> frames);
  std::size_t open(const nlohmann::json& entry, std::span<const std::string> frames);
  void drop(RequestId line);
  void drop_all();
  void end(RequestId line);
  RequestId further_choice();
  void add_event(const std::string& event);

  std::unique_ptr<FrameChannel> channel_;
  RequestRules rules_;
  std::string id_, front_;  // whom it was last heard of
  std::uint64_t lost_connections_ = 0;
  std::unordered_map<std::uint32_t, OpenRequest> open_;  // each choice for itself
  std::uint32_t next_further_ = kFirstFurtherChoice;
  std::vector<std::unique_ptr<const Request>> ended_;
  std::vector<const Request*> arrived_, cancelled_;
  std::string events_;                // of the message that is being made
  std::vector<std::string> results_;  // its frames
  Seconds said_hello_{-1};
};

}  // namespace poise
