// Builds this project's player for the pipeline. Copy this file to Assets/Editor/ of the project.
//
// The pipeline calls:  Unity -batchmode -quit -nographics -projectPath ... \
//                          -executeMethod PipelineBuild.Build -logFile - -pipelineOutput <path>
// and looks for the player beside <path>. An exception ends the Editor with exit code 1.

using System;
using System.IO;
using System.Linq;
using UnityEditor;
using UnityEditor.Build.Reporting;

public static class PipelineBuild
{
    public static void Build()
    {
        string output = Argument("-pipelineOutput");
        if (output == null)
        {
            throw new ArgumentException("-pipelineOutput <path of the player> is missing");
        }
        string[] scenes = EditorBuildSettings.scenes
            .Where(scene => scene.enabled)
            .Select(scene => scene.path)
            .ToArray();
        if (scenes.Length == 0)
        {
            throw new InvalidOperationException("no scene is enabled in File > Build Settings");
        }
        BuildTarget target = Target();
        var options = new BuildPlayerOptions
        {
            scenes = scenes,
            target = target,
            targetGroup = BuildTargetGroup.Standalone,
            locationPathName = output + Suffix(target),
            options = BuildOptions.None,
        };
        Directory.CreateDirectory(Path.GetDirectoryName(options.locationPathName));
        BuildSummary summary = BuildPipeline.BuildPlayer(options).summary;
        if (summary.result != BuildResult.Succeeded)
        {
            throw new Exception(
                $"Build {summary.result}: {summary.totalErrors} errors, see the lines above");
        }
    }

    // The value after a name on the command line, or null.
    private static string Argument(string name)
    {
        string[] arguments = Environment.GetCommandLineArgs();
        int at = Array.IndexOf(arguments, name);
        return at >= 0 && at + 1 < arguments.Length ? arguments[at + 1] : null;
    }

    // The system that the Editor runs on.
    private static BuildTarget Target()
    {
#if UNITY_EDITOR_OSX
        return BuildTarget.StandaloneOSX;
#elif UNITY_EDITOR_WIN
        return BuildTarget.StandaloneWindows64;
#else
        return BuildTarget.StandaloneLinux64;
#endif
    }

    private static string Suffix(BuildTarget target)
    {
        switch (target)
        {
            case BuildTarget.StandaloneOSX:
                return ".app";
            case BuildTarget.StandaloneWindows64:
                return ".exe";
            default:
                return ".x86_64";
        }
    }
}
