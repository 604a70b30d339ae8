# Runs the process that the lines above describe, on its own host.
#
# Orders come in through stdin, one word on a line: INT, TERM, KILL, or any other as a sign of life.
# When stdin ends, or nothing came for $silence seconds, the launcher or the connection is gone: the
# process gets SIGTERM, as after an order, and SIGKILL $grace seconds later. The last line of stdout
# has the exit code of the process (128 + the number for a signal).

trap 'echo "exit $?"' EXIT
exec 3<&0 </dev/null
mkdir -p -- "${log%/*}" && : >>"$log" || exit 2
start >>"$log" 2>&1 3<&- &
pid=$!

# all SIGNAL: to every process of the session.
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
  # A signal to this shell ends the wait too.
  kill -0 "$pid" 2>/dev/null || break
done
kill -s KILL -- "-$pid" 2>/dev/null
kill "$obeying" 2>/dev/null
exit "$code"
