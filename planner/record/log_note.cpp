#include "planner/record/log_note.h"

#include <span>

namespace poise {

void log_note(OrderLog& log, const std::string& run_id, messages::BodyUnion body) {
  messages::MessageT message;
  message.run_id = run_id;
  message.body = std::move(body);
  flatbuffers::FlatBufferBuilder builder;
  messages::FinishMessageBuffer(builder, messages::Message::Pack(builder, &message));
  log.append(std::as_bytes(std::span(builder.GetBufferPointer(), builder.GetSize())));
}

}  // namespace poise
