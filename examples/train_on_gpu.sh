#!/usr/bin/env bash
# Train a DFlash drafter on one GPU, in runs of under 12 minutes on an H200.
#
#     bash examples/train_on_gpu.sh FOLDER [MODEL] [MASK_TOKEN_ID]
#
# MODEL is a path or Hub id, by default the embedded SmolLM2-135M-Instruct. MASK_TOKEN_ID is a token of the model that
# never occurs in text.
#
# Run the script again with the same FOLDER to continue: training resumes from its checkpoint. TRAIN_SECONDS=0 only adds
# training data, and you can do this several times. Once training has begun, the data stays as it is. Set
# GENERATE_SECONDS, TRAIN_SECONDS, SHARDS and STEPS in the environment to override the defaults below.
set -euo pipefail

folder=$1 model=${2:-embedded} mask_token_id=${3:-16}
prompts=$(dirname "$0")/../hf_ddtree/benchmark/prompts.jsonl

within() {  # Run a command for at most so many seconds. A timeout is not a failure, because the next run continues.
    local seconds=$1
    shift
    [ "$seconds" = 0 ] || timeout --signal=INT --kill-after=20 "$seconds" "$@" || [ $? = 124 ]
}

if [ ! -e "$folder/drafter/checkpoint.safetensors" ]; then
    within "${GENERATE_SECONDS:-270}" python -m hf_ddtree.training generate --model "$model" --output "$folder/data" \
        --shards "${SHARDS:-200}" --shard-size 4096 --batch-size 1024 --max-new-tokens 256
fi

within "${TRAIN_SECONDS:-300}" python -m hf_ddtree.training train --model "$model" --data "$folder/data" \
    --output "$folder/drafter" --steps "${STEPS:-3000}" --batch-size 64 --anchors 64 --frequent 0 --negatives 0 \
    --kl-weight 0.5 --mask-token-id "$mask_token_id" --evaluate-every 250

if [ -e "$folder/drafter/model.safetensors" ]; then
    python -m hf_ddtree.training evaluate --model "$model" --drafter "$folder/drafter" --prompts "$prompts"
fi
