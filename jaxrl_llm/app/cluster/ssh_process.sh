# Runs the process that the lines above describe, on its own host.
#
# Orders are read from stdin, one word per line: INT, TERM or KILL. Any other word is only a sign of
# life. If stdin ends, or nothing arrives for $silence seconds, the launcher or the connection is
# lost. The process then gets SIGTERM, as after an order, and SIGKILL $grace seconds later. The last
# line of stdout has the exit code of the process (128 + the signal's number if a signal ended it).

trap 'echo "exit $?"' EXIT
exec 3<&0 </dev/null
mkdir -p -- "${log%/*}" && : >>"$log" || exit 2
start >>"$log" 2>&1 3<&- &
pid=$!

# all SIGNAL: sends a signal to every process of the session.
all() { kill -s "$1" -- "-$pid" 2>/dev/null || kill -s "$1" "$pid" 2>/dev/null; }

end() {
  all "$1"
  waited=0
  while kill -0 -- "-$pid" 2>/dev/null; do
    sleep 1
    waited=$((waited + 1))
    [ "$waited" -lt "$grace" ] || all KILL
  done
}

obey() {
  ending=
  while word=$(timeout "$silence" sh -c 'read -r word && printf %s "$word"'); do
    case $word in
      INT | TERM)
        [ -n "$ending" ] || end "$word" &
        ending=yes
        ;;
      KILL) all KILL ;;
    esac
  done
  [ -n "$ending" ] || end TERM
}

obey <&3 >/dev/null 2>&1 &
obeying=$!
exec 3<&-
trap 'all TERM' HUP INT TERM
while :; do
  wait "$pid" 2>/dev/null
  code=$?
  # A signal to this shell also ends the wait.
  kill -0 "$pid" 2>/dev/null || break
done
kill -s KILL -- "-$pid" 2>/dev/null
kill "$obeying" 2>/dev/null
exit "$code"
