#!/usr/bin/env bash
# An agent without a library: it asks the policy the problem and prints the answer, with curl.
set -euo pipefail
messages=$(cat)
curl --silent --show-error --fail-with-body "$OPENAI_BASE_URL/chat/completions" \
    --header "Authorization: Bearer $OPENAI_API_KEY" --header "Content-Type: application/json" \
    --data "{\"model\": \"policy\", \"messages\": $messages}"
