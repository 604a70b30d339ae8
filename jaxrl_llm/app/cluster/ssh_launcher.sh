# Starts the processes of the job above over ssh, and supervises them until all have ended.
#
# The job ends as a whole: if a process fails, the other processes get SIGTERM, and SIGKILL $grace
# seconds later. The exit code is 0 if no process failed, 2 if a host cannot be used, and otherwise
# that of the process that caused the failure: 128 + the signal's number if a signal ended it, and
# 255 if its connection was lost. After exit code 75 or 255, or a signal, the job is started again,
# at most $restarts times. SIGINT, SIGTERM and SIGHUP are passed on to all processes, which have
# $grace seconds to commit; a second signal kills them. If this shell dies, the processes end.
#
# Descriptors 7 and 8 are the write end and the read end of the FIFO through which messages arrive.
# Descriptor 9 leads to tee, which copies each order to all processes. Only this shell has 8 and 9
# open, so they are closed when it dies.

beat=5
linger=600
ticker= asked= running=
umask 077
trap '' PIPE

say() { printf 'ssh: %s\n' "$*" >&2; }

fail() {
  say "error: $*"
  exit 2
}

now() { date +%s; }

remote() {
  ssh -T -a -x -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=10 \
    -o ServerAliveCountMax=3 -o ControlPath=none -o ClearAllForwardings=yes \
    -o RemoteCommand=none -o LogLevel=ERROR "$@"
}

# note STATE CODE: writes the file that --status reads.
note() {
  printf '{"job": "%s", "state": "%s", "code": %s, "restarts": %d, "host": "%s", "fifo": "%s", "at": %d}\n' \
    "$job" "$1" "$2" "$attempt" "$(uname -n | tr -cd 'A-Za-z0-9._-')" "$tmp/news" "$(now)" \
    >"$folder/state.new" && mv -f -- "$folder/state.new" "$folder/state.json"
}

finish() {
  [ -z "$ticker" ] || kill "$ticker" 2>/dev/null
  rm -rf -- "$tmp"
}

# ask SIGNAL: handles a request to end the job.
ask() {
  if [ -z "$asked" ]; then
    asked=$1
    say "SIG$1: stopping the job within $grace s"
    [ -z "$running" ] || stop "$1"
  elif [ -n "$running" ]; then
    say "SIG$1 again: killing the processes"
    echo KILL >&9
  fi
}

# stop SIGNAL: sends a signal to all processes. Further calls have no effect.
stop() {
  [ -z "$stopping" ] || return
  stopping=yes
  kill_at=$(($(now) + grace + 5))
  echo "$1" >&9
}

# prepare: copies the files to every host. Returns 1 if a host cannot be used.
prepare() {
  pids=
  bad=
  host=0
  while [ "$host" -lt "$hosts" ]; do
    files_of "$host" 2>"$tmp/error.$host" >/dev/null 7>&- 8<&- &
    pids="$pids $!"
    host=$((host + 1))
  done
  host=0
  for pid in $pids; do
    wait "$pid" || bad="$bad $host"
    host=$((host + 1))
  done
  [ -n "$asked" ] && return 1
  for host in $bad; do
    reason=$(tail -n 1 "$tmp/error.$host" | tr -d '\r')
    say "error: host $(host_name "$host"): ${reason:-the files cannot be copied there}"
    return 1
  done
}

# run NUMBER: runs a process and writes its exit code to the FIFO. The code is 255 if the connection
# was lost before the host reported it.
run() {
  word=$(process "$1" <"$tmp/to.$attempt.$1" | sed -n 's/^exit \([0-9][0-9]*\)$/\1/p' | tail -n 1)
  echo "end $attempt $1 ${word:-255}" >&7
}

start() {
  mkfifo "$tmp/all.$attempt" || fail "$tmp: a FIFO cannot be made there"
  set --
  number=0
  while [ "$number" -lt "$processes" ]; do
    set -- "$@" "$tmp/to.$attempt.$number"
    number=$((number + 1))
  done
  mkfifo "$@" || fail "$tmp: a FIFO cannot be made there"
  tee "$@" <"$tmp/all.$attempt" >/dev/null 2>&1 7>&- 8<&- &
  number=0
  while [ "$number" -lt "$processes" ]; do
    run "$number" 8<&- &
    number=$((number + 1))
  done
  exec 9>"$tmp/all.$attempt"
  running=yes
}

# ended NUMBER CODE: records the end of a process.
ended() {
  left=$((left - 1))
  if [ "$2" = 0 ]; then
    [ "$1" -lt "$trainers" ] || return
    training=$((training - 1))
    if [ "$training" = 0 ]; then
      stop TERM
    elif [ -z "$linger_until" ]; then
      linger_until=$(($(now) + linger))
    fi
    return
  fi
  [ -z "$stopping" ] || [ -n "$asked" ] || return
  if [ -z "$culprit" ] || { consequence "$code" && ! consequence "$2"; }; then
    culprit=$1
    code=$2
  fi
  if [ -n "$asked" ]; then
    return
  elif consequence "$code"; then
    [ -n "$cause_until" ] || cause_until=$(($(now) + 2))
  else
    stop_for_culprit
  fi
}

# consequence CODE: succeeds if processes end with this code because another process has ended, or
# because they were asked to end.
consequence() {
  case $1 in
    75 | 134) true ;;
    130 | 143) [ -n "$asked" ] ;;
    *) false ;;
  esac
}

stop_for_culprit() {
  [ -z "$stopping" ] || return
  say "$(process_name "$culprit") ended with $code; stopping the other $left"
  stop TERM
}

# tick: sends a sign of life to the processes, and acts on deadlines that have passed.
tick() {
  time=$(now)
  echo beat >&9
  if [ -n "$cause_until" ] && [ "$time" -ge "$cause_until" ]; then
    stop_for_culprit
  fi
  if [ -n "$linger_until" ] && [ -z "$stopping" ] && [ "$time" -ge "$linger_until" ]; then
    say "$linger s after the end of the first trainer process, others are running; stopping the job"
    code=1
    stop TERM
  fi
  if [ "$limit" -gt 0 ] && [ -z "$asked" ] && [ "$time" -ge $((begun + limit)) ]; then
    say "the time limit of $limit s is over; stopping the job"
    ask TERM
  fi
  if [ -n "$kill_at" ] && [ "$time" -ge "$kill_at" ]; then
    if [ -n "$killed" ]; then
      say "$left processes do not end even after SIGKILL; leaving them"
      left=0
    else
      say "killing $left processes, which have not ended after a signal"
      killed=yes
      kill_at=$((time + 40))
      echo KILL >&9
    fi
  fi
}

supervise() {
  left=$processes training=$trainers code=0
  culprit= stopping= killed= kill_at= linger_until= cause_until=
  start
  [ -z "$asked" ] || stop "$asked"
  note running null
  while [ "$left" -gt 0 ]; do
    # A signal may also interrupt the read.
    read -r word one two three <&8 || continue
    case $word in
      tick) tick ;;
      end) [ "$one" != "$attempt" ] || ended "$two" "$three" ;;
      cancel) ask TERM ;;
    esac
  done
  running=
  exec 9>&-
  [ -z "$culprit" ] || say "culprit: $(process_name "$culprit"), ended with $code"
}

may_cure() { [ "$code" = 75 ] || [ "$code" -ge 128 ]; }

command -v ssh >/dev/null || fail 'there is no ssh in PATH; install an OpenSSH client'
tmp=$(mktemp -d /tmp/jaxrl.XXXXXXXX) || exit 2
trap finish EXIT
mkdir -p -- "$folder" || fail "$folder cannot be made; the run directory must be writable here too"
mkfifo "$tmp/news" || exit 2
exec 8<>"$tmp/news" 7>"$tmp/news"
attempt=0 code=0
begun=$(now)
trap 'ask INT' INT
trap 'ask TERM' TERM HUP
{ while sleep "$beat"; do echo tick >&7 || break; done; rm -rf -- "$tmp"; } </dev/null >/dev/null 2>&1 8<&- &
ticker=$!
note starting null
while :; do
  if prepare; then
    supervise
  elif [ -z "$asked" ] && [ "$attempt" = 0 ]; then
    note ended 2
    exit 2
  else
    code=255
  fi
  if [ -n "$asked" ] || ! may_cure || [ "$attempt" -ge "$restarts" ]; then
    break
  fi
  attempt=$((attempt + 1))
  say "restart $attempt of $restarts"
  note starting null
  pause=5
  # Processes whose connection was lost end by themselves within this time.
  [ "$code" != 255 ] || pause=$((silence + grace + 10))
  sleep "$pause" 7>&- 8<&- &
  wait "$!"
  if [ -n "$asked" ]; then
    break
  fi
done
if [ -n "$asked" ] && [ "$code" = 255 ]; then
  code=143
fi
note ended "$code"
exit "$code"
