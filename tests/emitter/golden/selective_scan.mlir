// castiron emit --kernel selective_scan --shape 1x2x16x16 --tokens 4 --isa avx2 --threads 2
// 185 lines, sha256 94a9fa02be1d18ce6391a95a8ba5107a01c625574d5fe557aeffe05d7686a55f
      scf.for %12 = %c0 to %5 step %c4 {
        %14 = memref.load %m1[%12, %1] : memref<4x2xf32>
        %15 = memref.load %m5[%1] : memref<2xf32>
        %16 = arith.addf %14, %15 : f32
        %17 = vector.broadcast %16 : f32 to vector<4xf32>
        %18 = math.absf %17 : vector<4xf32>
        %19 = arith.subf %c5, %18 : vector<4xf32>
        %20 = arith.cmpf ogt, %19, %c6 : vector<4xf32>
        %21 = arith.select %20, %19, %c6 : vector<4xi1>, vector<4xf32>
        %22 = arith.cmpf olt, %21, %c7 : vector<4xf32>
        %23 = arith.select %22, %21, %c7 : vector<4xi1>, vector<4xf32>
        %24 = math.fma %23, %c8, %c9 : vector<4xf32>
        %25 = arith.subf %24, %c9 : vector<4xf32>
        %26 = math.fma %25, %c10, %23 : vector<4xf32>
        %27 = math.fma %25, %c11, %26 : vector<4xf32>
        %28 = math.fma %c12, %27, %c13 : vector<4xf32>
        %29 = math.fma %28, %27, %c14 : vector<4xf32>
        %30 = math.fma %29, %27, %c15 : vector<4xf32>
        %31 = math.fma %30, %27, %c16 : vector<4xf32>
        %32 = arith.mulf %27, %27 : vector<4xf32>
        %33 = llvm.call_intrinsic "llvm.arithmetic.fence"(%32) : (vector<4xf32>) -> vector<4xf32>
        %34 = math.fma %33, %31, %27 : vector<4xf32>
        %35 = arith.addf %34, %c17 : vector<4xf32>
        %36 = vector.bitcast %24 : vector<4xf32> to vector<4xi32>
        %37 = arith.shli %36, %c18 : vector<4xi32>
        %38 = arith.addi %37, %c19 : vector<4xi32>
        %39 = vector.bitcast %38 : vector<4xi32> to vector<4xf32>
        %40 = arith.mulf %35, %39 : vector<4xf32>
        %41 = llvm.call_intrinsic "llvm.arithmetic.fence"(%40) : (vector<4xf32>) -> vector<4xf32>
        %42 = arith.cmpf ogt, %17, %c5 : vector<4xf32>
        %43 = arith.select %42, %17, %c5 : vector<4xi1>, vector<4xf32>
        %44 = math.log1p %41 : vector<4xf32>
        %45 = arith.addf %43, %44 : vector<4xf32>
        %46 = memref.load %m4[%1] : memref<2xf32>
        %47 = vector.broadcast %46 : f32 to vector<4xf32>
        %48 = arith.mulf %45, %47 : vector<4xf32>
        %49 = llvm.call_intrinsic "llvm.arithmetic.fence"(%48) : (vector<4xf32>) -> vector<4xf32>
        %50 = arith.cmpf ogt, %49, %c6 : vector<4xf32>
        %51 = arith.select %50, %49, %c6 : vector<4xi1>, vector<4xf32>
        %52 = arith.cmpf olt, %51, %c7 : vector<4xf32>
// 11 lines more
        %64 = math.fma %63, %61, %57 : vector<4xf32>
        %65 = arith.addf %64, %c17 : vector<4xf32>
        %66 = vector.bitcast %54 : vector<4xf32> to vector<4xi32>
        %67 = arith.shli %66, %c18 : vector<4xi32>
        %68 = arith.addi %67, %c19 : vector<4xi32>
        %69 = vector.bitcast %68 : vector<4xi32> to vector<4xf32>
        %70 = arith.mulf %65, %69 : vector<4xf32>
        %71 = llvm.call_intrinsic "llvm.arithmetic.fence"(%70) : (vector<4xf32>) -> vector<4xf32>
        %72 = vector.extract %45[0] : f32 from vector<4xf32>
        %73 = arith.subi %12, %c0 : index
        memref.store %72, %10[%c0, %73] : memref<2x4xf32>
        %74 = vector.extract %71[0] : f32 from vector<4xf32>
        %75 = arith.subi %12, %c0 : index
        memref.store %74, %10[%c4, %75] : memref<2x4xf32>
      }
