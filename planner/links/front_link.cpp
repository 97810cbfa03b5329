#include "planner/links/front_link.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <random>
#include <utility>

#include "common/files/json.h"
#include "common/files/json_file.h"
#include "common/trouble.h"
#include "planner/links/clock.h"
#include "planner/results/result_json.h"
#include "planner/results/result_line.h"

namespace poise {
namespace {

using nlohmann::json;

constexpr JsonLimits kFrontLimits{kMiB * 64, 8};
constexpr double kHelloEvery = 1;  // seconds
constexpr std::size_t kMostOpen = 1 << 20;

std::string any_id() {
  std::random_device random;
  return fmt::format("{:08x}{:08x}", random(), random());
}

RequestId id_in(const json& value) {
  if (!value.is_number_unsigned() || value.get<std::uint64_t>() == 0 ||
      value.get<std::uint64_t>() > UINT32_MAX) {
    fail(Exit::foreign, "the front numbers a request {}", value.dump());
  }
  return {value.get<std::uint32_t>()};
}

}  // namespace

FrontLink::FrontLink(std::unique_ptr<FrameChannel> channel, RequestRules rules)
    : channel_(std::move(channel)), rules_(std::move(rules)), id_(any_id()) {}

bool FrontLink::step(Seconds timeout) {
  ended_.clear();
  std::vector<std::string> frames = channel_->receive(timeout);
  const bool came = !frames.empty();
  while (!frames.empty()) {
    take(frames);
    frames = channel_->receive(Seconds{0});
  }
  if (channel_->ended() != lost_connections_) {
    lost_connections_ = channel_->ended();
    spdlog::warn("the connection to the front has ended: {} are dropped", open_.size());
    drop_all();
    id_ = any_id();
  }
  return came;
}

void FrontLink::take(std::span<const std::string> frames) {
  const json message = parse_json(frames.front(), "a message of the front", kFrontLimits);
  if (!message.is_object()) {
    fail(Exit::foreign, "a message of the front is no JSON object");
  }
  if (const auto front = message.find("front"); front != message.end() && *front != front_) {
    front_ = front->get<std::string>();
    spdlog::info("front {}: {} of the one before it are dropped", front_, open_.size());
    drop_all();
  }
  if (const auto submitted = message.find("submit"); submitted != message.end()) {
    auto rest = frames.subspan(1);
    for (const json& entry : *submitted) {
      rest = rest.subspan(open(entry, rest));
    }
  }
  if (const auto cancelled = message.find("cancel"); cancelled != message.end()) {
    for (const json& id : *cancelled) {
      drop(id_in(id));
    }
  }
}

// Returns how many frames are this request's.
std::size_t FrontLink::open(const json& entry, std::span<const std::string> frames) {
  const RequestId id = id_in(entry.at("id"));
  if (id.n >= kFirstFurtherChoice) {
    fail(Exit::foreign, "the front numbers a request {}", id.n);
  }
  const bool chat = entry.value("chat", false);
  const std::size_t own = chat ? 2 : 1;
  if (frames.size() < own || open_.contains(id.n)) {
    fail(Exit::foreign, "the front sent request {} {}", id.n,
         frames.size() < own ? "without its line" : "twice");
  }
  ParsedLine parsed =
      parse_request(id_in(entry.at("line")), frames[0], rules_, chat ? frames[1] : std::string());
  if (auto* error = std::get_if<RequestError>(&parsed)) {
    finish({.request = id, .error = true, .text = error_line(*error)});
    return own;
  }
  Request& request = std::get<Request>(parsed);
  if (open_.size() + static_cast<std::size_t>(request.choices) > kMostOpen) {
    finish({.request = id,
            .error = true,
            .text = error_line({id, request.custom_id.get(), "too many requests are open", "",
                                "too_many_requests", 429})});
    return own;
  }
  request.id = id;
  const bool streams = entry.value("stream", false) && !request.sampling.prompt_logprobs();
  std::vector<Request> choices;
  std::vector<RequestId> further;
  add_choices(
      std::move(request), [&] { return further.emplace_back(further_choice()); }, choices);
  for (Request& choice : choices) {
    auto kept = std::make_unique<const Request>(std::move(choice));
    arrived_.push_back(kept.get());
    const std::uint32_t key = kept->id.n;
    open_.emplace(
        key,
        OpenRequest{.request = std::move(kept), .streams = streams, .arrived = monotonic_now()});
  }
  open_.at(id.n).further = std::move(further);
  return own;
}

// An id that no open request has.
RequestId FrontLink::further_choice() {
  while (open_.contains(next_further_)) {
    next_further_ = std::max(next_further_ + 1, kFirstFurtherChoice);
  }
  const RequestId id{next_further_};
  next_further_ = std::max(next_further_ + 1, kFirstFurtherChoice);
  return id;
}

// One for which nobody waits any more.
void FrontLink::drop(RequestId line) {
  const auto found = open_.find(line.n);
  if (found == open_.end()) {
    return;  // it has just been answered
  }
  const auto take_back = [&](const OpenRequest& choice) {
    if (std::erase(arrived_, choice.request.get()) == 0) {
      cancelled_.push_back(choice.request.get());
    }
  };
  take_back(found->second);
  for (const RequestId further : found->second.further) {
    take_back(open_.at(further.n));
  }
  end(line);
}

void FrontLink::drop_all() {
  while (!open_.empty()) {
    drop(open_.begin()->second.request->line());
  }
  events_.clear();
  results_.clear();
  said_hello_ = Seconds{-1};
}

// The request itself stays until the next step: the run may still look at it.
void FrontLink::end(RequestId line) {
  const auto found = open_.find(line.n);
  if (found == open_.end()) {
    return;
  }
  for (const RequestId further : found->second.further) {
    ended_.push_back(std::move(open_.at(further.n).request));
    open_.erase(further.n);
  }
  ended_.push_back(std::move(found->second.request));
  open_.erase(found);
}

void FrontLink::ran(RequestId request, bool generated, Seconds began, Seconds now,
                    Histogram& between) {
  const auto found = open_.find(request.n);
  if (found == open_.end()) {
    return;
  }
  OpenRequest& open = found->second;
  if (open.began.n < 0) {
    open.began = began;
  }
  if (!generated) {
    return;
  }
  if (open.first_token.n < 0) {
    open.first_token = now;
  } else {
    between.observe((now - open.last_token).n);
  }
  open.last_token = now;
}

bool FrontLink::streams(RequestId request) const {
  const auto found = open_.find(request.n);
  return found != open_.end() && found->second.streams;
}

void FrontLink::progress(RequestId request, const Answer& answer,
                         std::span<const TokenId> tokens) {
  OpenRequest& open = open_.at(request.n);
  const SamplingParams& sampling = open.request->sampling;
  const bool with_tokens = sampling.logprobs >= 0 || sampling.return_token_ids;
  const Request& of = *open.request;
  const std::string_view prompt = sampling.echo ? std::string_view(of.prompt_text.get()) : std::string_view();
  const std::string_view settled = answer.settled_text();
  const std::size_t size = prompt.size() + settled.size();
  if (size <= open.sent_text && !(with_tokens && tokens.size() > open.sent_tokens)) {
    return;
  }
  std::string event = fmt::format("{{\"id\":{},", of.line().n);
  if (of.choice > 0) {
    event += fmt::format("\"choice\":{},", of.choice);
  }
  event += fmt::format("\"at\":{},\"text\":", open.sent_text);
  if (open.sent_text < prompt.size()) {
    append_json_text(event, fmt::format("{}{}", prompt.substr(open.sent_text), settled));
  } else {
    append_json_text(event, settled.substr(std::min(open.sent_text - prompt.size(), settled.size())));
  }
  open.sent_text = std::max(open.sent_text, size);
  if (with_tokens) {
    event += fmt::format(",\"first\":{}", open.sent_tokens);
    if (sampling.logprobs >= 0) {
      event += ",\"logprobs\":";
      answer.append_logprobs_from(event, tokens, open.sent_tokens);
    }
    if (sampling.return_token_ids) {
      event += ",\"token_ids\":";
      event += json(tokens.subspan(open.sent_tokens)).dump();
    }
    open.sent_tokens = tokens.size();
  }
  event += fmt::format(",\"tokens\":{}}}", tokens.size());
  add_event(event);
  if (open.first_event.n < 0) {
    open.first_event = open.last_token;
  }
}

void FrontLink::finish(const ResultLine& line) {
  results_.push_back(line.text);
  std::string event =
      fmt::format("{{\"id\":{},\"frame\":{}", line.request.n, results_.size());
  if (const auto found = open_.find(line.request.n);
      found != open_.end() && found->second.first_token.n >= 0) {
    const OpenRequest& open = found->second;
    event += fmt::format(
        ",\"waited\":{:.6f},\"prefill\":{:.6f},\"decode\":{:.6f},\"token_at\":{:.6f},\"event_at\":{:.6f}",
        (open.began - open.arrived).n, (open.first_token - open.began).n,
        (open.last_token - open.first_token).n, open.first_token.n,
        (open.first_event.n < 0 ? open.last_token : open.first_event).n);
  }
  add_event(event + "}");
  end(line.request);
}

void FrontLink::add_event(const std::string& event) {
  events_ += events_.empty() ? "{\"events\":[" : ",";
  events_ += event;
}

bool FrontLink::flush(Seconds now) {
  if (said_hello_.n < 0 || now.n - said_hello_.n >= kHelloEvery) {
    const json hello{{"planner", id_},
                     {"context", rules_.context},
                     {"vocab_size", rules_.vocab_size},
                     {"open", open_.size()}};
    const std::string frame = hello.dump();
    if (channel_->send({&frame, 1})) {
      said_hello_ = now;
    }
  }
  if (events_.empty()) {
    return true;
  }
  std::vector<std::string> frames{events_ + "]}"};
  frames.insert(frames.end(), results_.begin(), results_.end());
  if (!channel_->send(frames)) {
    return false;
  }
  events_.clear();
  results_.clear();
  return true;
}

}  // namespace poise
