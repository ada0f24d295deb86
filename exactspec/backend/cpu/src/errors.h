// Failures are reported as -1 with a message; nothing throws across the C interface.
#pragma once

namespace es {

// Stores the message for es_last_error() and returns -1.
__attribute__((format(printf, 1, 2))) int fail(const char* format, ...);

}  // namespace es
