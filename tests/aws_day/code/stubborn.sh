# Ignores SIGTERM, and prints the time every half second until SIGKILL. It is PID 1 of its container.
trap 'echo "AWS_DAY {\"kind\": \"term\", \"time\": $(date +%s.%N)}"' TERM
echo "AWS_DAY {\"kind\": \"begin\", \"time\": $(date +%s.%N)}"
while true; do
  sleep 0.5 &
  wait $!
  echo "AWS_DAY {\"kind\": \"alive\", \"time\": $(date +%s.%N)}"
done
